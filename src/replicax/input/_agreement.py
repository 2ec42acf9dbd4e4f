"""Input that several workers go through in step, however much each of them has."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import jax
import numpy as np

from replicax._typing import Json, Nest
from replicax.cluster import Exchange, Session
from replicax.errors import InputFailed, InvalidArgument, InvalidType, StructureMismatch
from replicax.input._ending import EndOfData
from replicax.input._feed import Feed, Step
from replicax.input._transfer import owned
from replicax.values import Shape

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

# The maximum number of a worker's steps, and of their bytes, that may be in flight. With 64, steps
# of 1 ms do not wait for a network with a round trip of 60 ms.
_MOST_STEPS = 64
_MOST_BYTES = 64 * 1024 * 1024

_SAME = None  # stands for an offer that is equal to the worker's last one


@dataclass(slots=True)
class Offered:
    """A step that this worker has read and announced to the others, or the lack of one.

    Without a step, `structure` and `state` are those of the worker's last one.
    """

    step: Step | None
    failure: Exception | None
    structure: PyTreeDef | None
    state: dict[str, Json]
    exchange: Exchange


@final
class OfferingFeed:
    """A feed that reads this worker's steps and announces each to the other workers at once.

    Their answers do not change what is read, so it does not wait for them.

    Args:
      begin: Makes the feed of this worker's input.
      replicas: The number of local replicas.
      session: The connection to the others.
      topic: The name of the pass; the same on all workers.
    """

    def __init__(
        self, begin: Callable[[], Feed], replicas: int, session: Session, topic: str
    ) -> None:
        self._begin = begin
        self._feed: Feed | None = None
        self._replicas = replicas
        self._session = session
        self._topic = topic
        self._number = 0
        self._at_end = self._failed = False
        self._structure: PyTreeDef | None = None
        self._state: dict[str, Json] = {}
        self._last_kind: object = None
        self._under_way: deque[Exchange] = deque()
        self._given_up = False

    def step(self) -> Offered:
        """Read a step and offer it; at the end of the data, offer the lack of one every time."""
        if self._failed:
            raise EndOfData  # after the failure, which ends the pass
        step, failure = self._own_step()
        kind = _kind_of(step)
        if failure is None and self._number and kind == self._last_kind:
            offer = _SAME  # as nearly always; the others then need not read it
        else:
            offer = _offer(step, failure, self._replicas)
        exchange = self._session.put_input(f"{self._topic}/{self._number}", offer)
        self._under_way.append(exchange)
        if self._given_up:
            self.withdraw()
        self._number += 1
        self._last_kind, self._failed = kind, failure is not None
        if step is not None:
            owned(step)  # the source may reuse its memory for the next one
            self._structure, self._state = step.structure, step.state
        return Offered(step, failure, self._structure, self._state, exchange)

    def _own_step(self) -> tuple[Step | None, Exception | None]:
        if self._at_end:  # not read again: some sources would start over
            return None, None
        try:
            if self._feed is None:
                self._feed = self._begin()
                self._state = self._feed.state
            return self._feed.step(), None
        except EndOfData:
            self._at_end = True
            return None, None
        except Exception as error:
            return None, error

    def forget_first(self) -> None:
        """Note that the first pending exchange is now being waited for."""
        self._under_way.popleft()

    def withdraw(self) -> None:
        """Abandon pending exchanges, and the next offer of a thread that still reads."""
        self._given_up = True
        with contextlib.suppress(IndexError):  # when there are no more
            while True:
                self._under_way.pop().withdraw()

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()


class Offers(Protocol):
    """A supply of offered steps, in order."""

    def step(self) -> Offered: ...

    def keep(self, count: int) -> None:
        """Read at least `count` steps ahead."""
        ...

    def close(self) -> None: ...


@final
class InTurn:
    """Offered steps that are read when they are needed, for sources that never wait."""

    def __init__(self, feed: OfferingFeed) -> None:
        self._feed = feed
        self._read: deque[Offered] = deque()
        self._count = 1

    def step(self) -> Offered:
        self.keep(self._count)
        return self._read.popleft()

    def keep(self, count: int) -> None:
        self._count = count
        with contextlib.suppress(EndOfData):
            while len(self._read) < count:
                self._read.append(self._feed.step())

    def close(self) -> None:
        self._feed.close()


@final
class AgreeingFeed:
    """Steps that all workers have agreed on; each gets as many as the one with the most.

    Every step is agreed on before it is handed out, in a prefetching thread, so that the
    training step never waits for it. A worker at the end of its data takes part with empty
    shares as long as others have something; if the input of one fails, all get an error.

    Having to wait for an agreement is a sign that more should be in flight: enough to arrive as
    fast as they are used, however far away the others are.

    Args:
      offering: The feed behind `offers`.
      offers: This worker's steps.
      replicas: The number of local replicas.
      session: The connection to the others.
      closed: Set when no more steps are wanted.
    """

    def __init__(
        self,
        offering: OfferingFeed,
        offers: Offers,
        replicas: int,
        session: Session,
        closed: threading.Event,
    ) -> None:
        self._offering = offering
        self._offers = offers
        self._replicas = replicas
        self._session = session
        self._closed = closed
        self._ahead = 1
        self._agreed: list[Json] = [_SAME] * session.members.count
        self._shapes: list[tuple[Shape, ...]] = []

    def step(self) -> Step:
        offered = self._offers.step()
        self._offering.forget_first()
        if not offered.exchange.complete:
            self._ahead = max(self._ahead, _further(self._ahead, offered.step))
            self._offers.keep(self._ahead)
        offers = self._session.wait_for_input(offered.exchange, self._closed)
        if offered.failure is not None:
            raise offered.failure
        if any(offer is not _SAME for offer in offers):
            self._compare(
                [
                    last if offer is _SAME else offer
                    for last, offer in zip(self._agreed, offers, strict=True)
                ]
            )
        step = offered.step or self._empty_step(offered)
        step.shapes = self._shapes
        return step

    def _compare(self, offers: list[dict[str, Nest]]) -> None:
        """Check that the workers' steps fit together, and keep the offers until one changes."""
        self._refuse_failures(offers)
        examples = [offer for offer in offers if "kind" in offer]
        if not examples:
            raise EndOfData
        self._require_alike(offers)
        if len(examples) < len(offers):
            _require_rows(examples[0])
        self._agreed = offers
        self._shapes = [_shapes_of(leaf, offers) for leaf in range(len(examples[0]["dtypes"]))]

    def _empty_step(self, offered: Offered) -> Step:
        """Return a step like that of another worker, without rows."""
        example = next(offer for offer in self._agreed if "kind" in offer)
        structure = offered.structure
        if structure is None:
            structure = jax.tree.structure(_unpacked(example["structure"]))
        parts = [
            [np.zeros((0, *shapes[0][1:]), np.dtype(dtype))] * self._replicas
            for shapes, dtype in zip(example["shapes"], example["dtypes"], strict=True)
        ]
        step = Step(structure, self._replicas, None, parts, offered.state, owned=True)
        step.read = False
        return step

    def _refuse_failures(self, offers: Sequence[dict[str, Nest]]) -> None:
        for name, offer in zip(self._session.members.names, offers, strict=True):
            if "failure" in offer:
                error = InputFailed(
                    f"The input of {name} failed: {offer['failure']}. Its own traceback says "
                    "where; no worker can continue without it."
                )
                error.follows_another = True
                raise error

    def _require_alike(self, offers: Sequence[dict[str, Nest]]) -> None:
        kinds = {
            name: f"{offer['kind']} of {', '.join(_comparable(each) for each in offer['dtypes'])}"
            for name, offer in zip(self._session.members.names, offers, strict=True)
            if "kind" in offer
        }
        if len(set(kinds.values())) > 1:
            seen = "; ".join(f"{name} has {kind}" for name, kind in kinds.items())
            raise StructureMismatch(
                f"The workers' elements must be of one kind: {seen}. Give all workers datasets "
                "of the same structure and dtypes."
            )

    def close(self) -> None:
        self._offering.withdraw()
        self._offers.close()


def _further(ahead: int, step: Step | None) -> int:
    """Return how many steps to have in flight now that `ahead` have proved too few."""
    each = 0 if step is None else sum(array.nbytes for array in step.arrays())
    return min(2 * ahead, _MOST_STEPS, _MOST_BYTES // max(each, 1))


def _kind_of(step: Step | None) -> object:
    """Return what the offer of a step depends on, for comparison with another step."""
    if step is None:
        return None
    kinds = [(array.shape, array.dtype) for array in step.arrays()]
    return step.structure, step.wholes is None, kinds


def _offer(step: Step | None, failure: Exception | None, replicas: int) -> dict[str, object]:
    """Return the information about a step that the other workers need."""
    if failure is not None:
        return {"failure": f"{type(failure).__name__}: {failure}"[:2000]}
    if step is None:
        return {"replicas": replicas}
    columns = step.columns()
    structure = _packed(jax.tree.unflatten(step.structure, range(len(columns))))
    return {
        "kind": str(structure),
        "structure": structure,
        "shapes": [[array.shape for array in column] for column in columns],
        "dtypes": [str(column[0].dtype) for column in columns],
    }


def _require_rows(example: dict[str, Json]) -> None:
    if any(shape == [] for shapes in example["shapes"] for shape in shapes):
        raise InvalidArgument(
            "The input of one worker ended before that of another, and the elements are single "
            "numbers, of which a replica cannot get none. Batch them, or give all workers as many."
        )


def _comparable(dtype: str) -> str:
    """Return the name to compare dtypes by; strings of any length are of one kind."""
    kind = np.dtype(dtype).kind
    return {"U": "str", "S": "bytes"}.get(kind, dtype)


def _shapes_of(leaf: int, offers: Sequence[dict[str, Nest]]) -> tuple[Shape, ...]:
    """Return a leaf's shapes on all replicas; workers without an element have no rows."""
    rest = next(offer["shapes"][leaf][0][1:] for offer in offers if "kind" in offer)
    return tuple(
        tuple(shape)
        for offer in offers
        for shape in (
            offer["shapes"][leaf] if "kind" in offer else [(0, *rest)] * offer["replicas"]
        )
    )


def _packed(nest: Nest) -> object:
    """Return a nest of dicts, lists, tuples and numbers in a form that JSON can express."""
    if nest is None or isinstance(nest, int):
        return nest
    if type(nest) is dict and all(isinstance(key, str) for key in nest):
        return {"dict": {key: _packed(value) for key, value in nest.items()}}
    if type(nest) in (list, tuple):
        return {type(nest).__name__: [_packed(value) for value in nest]}
    return {"other": type(nest).__name__}


def _unpacked(packed: Json) -> Nest:
    if packed is None or isinstance(packed, int):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {key: _unpacked(value) for key, value in content.items()}
    if kind == "other":
        raise InvalidType(
            "This worker has no element of its own, and cannot make an empty one of the kind that "
            f"others have, a {content}. Use dicts, lists and tuples, or give every worker an "
            "element."
        )
    values = [_unpacked(value) for value in content]
    return tuple(values) if kind == "tuple" else values
