"""How several workers go through their input in step, whatever each of them has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax.cluster import Session
from replicax.errors import InputFailed, InvalidArgument, InvalidType, StructureMismatch
from replicax.input._ending import EndOfData
from replicax.input._feed import Feed, Step
from replicax.values import Shape


@final
class AgreeingFeed(Feed):
    """This worker's feed, together with those of the others: all have as many steps as the longest.

    Every step is agreed on before it is given out, in the thread that works ahead, so that the
    training step never waits for it. A worker that has come to its end takes part with empty
    shares as long as others have something; if the input of one fails, all are told.

    Args:
      begin: Makes the feed of what this worker has.
      replicas: How many of the replicas are local.
      session: The connection with the others.
      topic: What the pass is called; the same on all workers.
      closed: Says that nobody wants more steps.
    """

    def __init__(
        self,
        begin: Callable[[], Feed],
        replicas: int,
        session: Session,
        topic: str,
        closed: threading.Event,
    ) -> None:
        self._begin = begin
        self._feed: Feed | None = None
        self._replicas = replicas
        self._session = session
        self._topic = topic
        self._closed = closed
        self._number = 0
        self._at_end = False
        self._structure: Any = None
        self._last_state: dict[str, Any] = {}

    def step(self) -> Step:
        own, failure = self._own_step()
        topic = f"{self._topic}/{self._number}"
        self._number += 1
        offers = self._session.exchange(topic, _offer(own, failure, self._replicas), self._closed)
        if failure is not None:
            raise failure
        self._refuse_failures(offers)
        examples = [offer for offer in offers if "kind" in offer]
        if not examples:
            raise EndOfData
        self._require_alike(offers)
        if len(examples) < len(offers):
            _require_rows(examples[0])
        if own is None:
            own = self._empty_step(examples[0])
        self._structure, self._last_state = own.structure, own.state
        own.shapes = [_shapes_of(leaf, offers) for leaf in range(len(examples[0]["dtypes"]))]
        return own

    def _empty_step(self, example: dict[str, Any]) -> Step:
        """Such as that of another worker, without rows."""
        if self._structure is None:
            self._structure = jax.tree.structure(_unpacked(example["structure"]))
        parts = [
            [np.zeros((0, *shapes[0][1:]), np.dtype(dtype))] * self._replicas
            for shapes, dtype in zip(example["shapes"], example["dtypes"], strict=True)
        ]
        step = Step(self._structure, self._replicas, None, parts, self._last_state, owned=True)
        step.read = False
        return step

    def _own_step(self) -> tuple[Step | None, BaseException | None]:
        if self._at_end:  # it is not asked again: some would begin anew
            return None, None
        try:
            if self._feed is None:
                self._feed = self._begin()
                self._last_state = self._feed.state
            return self._feed.step(), None
        except EndOfData:
            self._at_end = True
            return None, None
        except Exception as error:
            return None, error

    def _refuse_failures(self, offers: Sequence[dict[str, Any]]) -> None:
        for name, offer in zip(self._session.members.names, offers, strict=True):
            if "failure" in offer:
                error = InputFailed(
                    f"The input of {name} failed: {offer['failure']}. Its own traceback says "
                    "where; no worker can go on without it."
                )
                error.follows_another = True
                raise error

    def _require_alike(self, offers: Sequence[dict[str, Any]]) -> None:
        kinds = {
            name: f"{offer['kind']} of {', '.join(_comparable(each) for each in offer['dtypes'])}"
            for name, offer in zip(self._session.members.names, offers, strict=True)
            if "kind" in offer
        }
        if len(set(kinds.values())) > 1:
            seen = "; ".join(f"{name} has {kind}" for name, kind in kinds.items())
            raise StructureMismatch(
                f"The workers' elements have to be of one kind: {seen}. Give all workers datasets "
                "of the same structure and dtypes."
            )

    @property
    def state(self) -> dict[str, Any]:
        return self._last_state

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()


def _offer(step: Step | None, failure: BaseException | None, replicas: int) -> dict[str, Any]:
    """What the other workers have to know of a step."""
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


def _require_rows(example: dict[str, Any]) -> None:
    if any(shape == [] for shapes in example["shapes"] for shape in shapes):
        raise InvalidArgument(
            "The input of one worker ended before that of another, and the elements are single "
            "numbers, of which a replica cannot get none. Batch them, or give all workers as many."
        )


def _comparable(dtype: str) -> str:
    """Strings of any length are of one kind."""
    kind = np.dtype(dtype).kind
    return {"U": "str", "S": "bytes"}.get(kind, dtype)


def _shapes_of(leaf: int, offers: Sequence[dict[str, Any]]) -> tuple[Shape, ...]:
    """Of one leaf's arrays, those of all replicas; workers without an element have no rows."""
    rest = next(offer["shapes"][leaf][0][1:] for offer in offers if "kind" in offer)
    return tuple(
        tuple(shape)
        for offer in offers
        for shape in (
            offer["shapes"][leaf] if "kind" in offer else [(0, *rest)] * offer["replicas"]
        )
    )


def _packed(nest: Any) -> Any:
    """A nest of dicts, lists, tuples and numbers as JSON can tell it."""
    if nest is None or isinstance(nest, int):
        return nest
    if type(nest) is dict and all(isinstance(key, str) for key in nest):
        return {"dict": {key: _packed(value) for key, value in nest.items()}}
    if type(nest) in (list, tuple):
        return {type(nest).__name__: [_packed(value) for value in nest]}
    return {"other": type(nest).__name__}


def _unpacked(packed: Any) -> Any:
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
