"""The bridge between Flax and the rest of the library."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import jax
from flax import errors, nnx

from replicax import _bridges, _context, _nest
from replicax._bridges import Memory
from replicax._context import ContextKind
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType
from replicax.integrations.flax._discovery import Reach, may_lead_somewhere
from replicax.integrations.flax._fingerprint import Fingerprint, fingerprint
from replicax.integrations.flax._optimizer import install
from replicax.integrations.flax._swap import AcrossReplicas, Contents, InReplica, active
from replicax.integrations.flax._variables import standing_for
from replicax.variables import Variable


def bridge() -> _bridges.Bridge:
    """Teach the rest of the library about NNX objects, and return the bridge."""
    _nest.register_opaque(nnx.Pytree)
    install()
    return _Flax()


@final
class _Flax:
    def follow(self) -> None:
        pass  # a module belongs to the strategy that runs it, wherever it was made

    def surround(self, fn: Callable[..., object]) -> Callable[..., object]:
        settings = _Settings()

        def surrounded(*args: object, **kwargs: object) -> Any:
            if _context.current().overlay is not None:  # in a differentiated function
                return fn(*args, **kwargs)
            with settings.entered(), _explaining():
                return _call(fn, args, kwargs)

        return surrounded

    def suspended(self) -> AbstractContextManager[object]:
        exchange = active.get()
        return nullcontext() if exchange is None else _put_aside(exchange)

    def variable(self, value: Any) -> Variable | None:
        return None  # in our nests, an NNX variable is a pytree of its value

    def fingerprint(
        self, fn: Callable[..., object], leaves: Sequence[object], memory: Memory
    ) -> Fingerprint:
        return fingerprint(fn, leaves, memory)

    def examine(self, constants: Sequence[object], variables: Sequence[Variable]) -> None:
        """Refuse a module that was read but not found: the program would never see its changes."""
        arrays = [x for x in constants if isinstance(x, jax.Array)]
        if not arrays:
            return
        known = set(variables)
        for holder in gc.get_referrers(*arrays):
            if type(holder) is not dict and isinstance(holder, nnx.Variable):
                found = standing_for(holder)
                if found is None or known.isdisjoint(found.existing()):
                    raise InvalidArgument(
                        f"A compiled function reads an NNX variable that was not found before it "
                        f"was traced, a {type(holder).__name__} of shape {holder.shape}, and would "
                        "never see it change. Give the module to the function as an argument, or "
                        "let the function close over it."
                    )


@contextmanager
def _put_aside(exchange: InReplica | AcrossReplicas) -> Iterator[None]:
    token = active.set(None)
    around: InReplica | AcrossReplicas | None = exchange
    with ExitStack() as stack:
        stack.callback(active.reset, token)
        while around is not None:
            stack.enter_context(around.suspended())
            around = around.outer
        yield


def _call(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Nest]) -> Any:
    """Call `fn` with NNX objects that follow our rules."""
    frame = _context.current()
    outer = active.get()
    leaves = _nest.leaves((args, kwargs), keep_opaque=True)
    reach = Reach([fn, *(leaf for leaf in leaves if may_lead_somewhere(leaf))])
    nodes, reached = reach.nodes, reach.variables
    if outer is not None:
        nodes = [node for node in nodes if not outer.covers(node)]
        reached = [each for each in reached if not outer.covers(each.variable)]
    if not nodes and not reached:
        result = fn(*args, **kwargs)
        if frame.program is not None:
            _require_known(result, outer)
        return result
    if frame.strategy is None and frame.program is None:
        return _all_or_nothing(fn, args, kwargs, Contents([r.variable for r in reached], nodes))
    in_replica = frame.kind is ContextKind.REPLICA and frame.strategy is not None
    exchange = (InReplica if in_replica else AcrossReplicas)(reached, nodes, outer, frame)
    token = active.set(exchange)
    try:
        result = fn(*args, **kwargs)
        if frame.program is not None:
            _require_known(result, exchange)
        result = _taken_along(result, exchange)
        active.set(None)  # `finish` restores the objects, so nothing is left to suspend
        exchange.finish()
    except BaseException:
        exchange.undo()
        raise
    finally:
        active.reset(token)
    return result


def _all_or_nothing(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Nest], before: Contents
) -> object:
    """Call `fn` without a strategy or a program, and restore the objects if it fails."""
    try:
        return fn(*args, **kwargs)
    except BaseException:
        before.put()
        raise


def _taken_along(result: object, exchange: InReplica | AcrossReplicas) -> object:
    """Return a function's result with the variable values that the function saw.

    The variables in an `nnx.State` are those of the module, whose values are about to change.
    """
    return jax.tree.map(
        lambda leaf: (
            leaf.copy() if isinstance(leaf, nnx.Variable) and exchange.covers(leaf) else leaf
        ),
        result,
        is_leaf=lambda node: isinstance(node, (nnx.Variable, nnx.Pytree, _nest.AlwaysLeaf)),
    )


def _require_known(result: object, exchange: InReplica | AcrossReplicas | None) -> None:
    for leaf in _nest.leaves(result, keep_opaque=True):
        if isinstance(leaf, nnx.Pytree) and not (exchange and exchange.covers(leaf)):
            raise InvalidType(
                f"A compiled function returned a {type(leaf).__name__} that was made inside of it, "
                "and whose arrays do not outlive it. Return its state, `nnx.state(module)`, or "
                "make the module outside."
            )


_NOT_FOUND = (
    "In a function given to `run` or `rx.function`, that is an NNX object which was not found "
    "before it ran. Give it to the function as an argument, or let the function close over it."
)


@contextmanager
def _explaining() -> Iterator[None]:
    """Add a note to Flax's errors that explains what they mean here."""
    try:
        yield
    except errors.TraceContextError as error:
        if _NOT_FOUND not in getattr(error, "__notes__", ()):
            error.add_note(_NOT_FOUND)
        raise


@final
class _Settings:
    """The NNX settings of this thread, for use in the replicas' threads."""

    def __init__(self) -> None:
        self._values = self._current()

    @staticmethod
    def _current() -> tuple[Any, ...]:
        modes = nnx.set_graph_mode.current_value(), nnx.set_graph_updates.current_value()
        return (*modes, nnx.var_defaults())

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._values == self._current():
            yield
            return
        graph, updates, variables = self._values
        with (
            nnx.set_graph_mode(graph),
            nnx.set_graph_updates(updates),
            nnx.var_defaults(hijax=variables.hijax, ref=variables.ref),
        ):
            yield
