"""The context of the running code: the only ambient state of replicax.

It is one frozen frame in one `ContextVar`. The outermost frame is the replica context of the
default strategy, which `strategy is None` stands for; `scope`, `run`, `merge_call` and `update`
replace it with another one and then restore it. A new thread starts at the outermost frame.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replicax.errors import ContextError

if TYPE_CHECKING:
    from replicax._typing import ClosureLike, ProgramLike, Replica, StrategyLike
    from replicax.execution import FunctionCache, Rehearsal
    from replicax.variables import Overlay, Transaction, Variable


class ContextKind(enum.Enum):
    CROSS_REPLICA = "cross-replica"
    REPLICA = "replica"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Frame:
    """One context.

    `replica` is set in replica context and `copy`, the copy of the variables being updated, in
    update context. `colocate_with` and `partition` say how new variables are placed.
    `overlay` holds the values that variables have only within a differentiated function,
    `transaction` what to restore if the running function fails, and `program` the program that is
    being traced. `uneven` says that a compiled function runs eagerly because its replicas differ;
    `runs` compiles the functions that a compiled function with a loop over elements gives to `run`;
    in a `rehearsal` all functions run eagerly, and iterators show elements without taking them.
    `closure` is the scheduled function that is being traced, or the worker that a dataset is for.
    """

    strategy: StrategyLike | None = None
    kind: ContextKind = ContextKind.REPLICA
    replica: Replica | None = None
    copy: int | None = None
    colocate_with: Variable | None = None
    partition: tuple[int, ...] | None = None
    overlay: Overlay | None = None
    transaction: Transaction | None = None
    program: ProgramLike | None = None
    uneven: bool = False
    runs: FunctionCache | None = None
    rehearsal: Rehearsal | None = None
    closure: ClosureLike | None = None
    installed: bool = False

    def __str__(self) -> str:
        owner = "the default strategy" if self.strategy is None else repr(self.strategy)
        return f"{self.kind.value} context of {owner}"


_OUTERMOST = Frame()
_frame: ContextVar[Frame] = ContextVar("replicax_frame", default=_OUTERMOST)


def current() -> Frame:
    return _frame.get()


class entered:  # noqa: N801  used as `with entered(frame):`; contextlib's form costs 1 us more
    """A context manager that makes `frame` the current one."""

    __slots__ = ("_frame", "_token")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __enter__(self) -> Frame:
        self._token = _frame.set(self._frame)
        return self._frame

    def __exit__(self, *exception: object) -> None:
        _frame.reset(self._token)


def install(strategy: StrategyLike | None) -> None:
    """Make `strategy` current until further notice, or reset the current one with None."""
    if strategy is None:
        _frame.set(_OUTERMOST)
    else:
        _frame.set(Frame(strategy, ContextKind.CROSS_REPLICA, installed=True))


def outside_of_scopes() -> Frame:
    """Return the current frame as it would be outside of every scope."""
    return replace(current(), strategy=None, kind=ContextKind.REPLICA, replica=None)


def in_scope() -> bool:
    """Tell whether a `with` block or a running function (not `install`) made the current frame."""
    frame = current()
    return frame is not _OUTERMOST and not frame.installed


def cross_replica(strategy: StrategyLike, method: str) -> Frame:
    """Return the frame of a cross-replica method of `strategy`; refuse other contexts."""
    frame = current()
    if frame.strategy is strategy.identity and frame.kind is ContextKind.CROSS_REPLICA:
        return replace(frame, installed=False) if frame.installed else frame
    if frame.kind is not ContextKind.REPLICA or frame.strategy is not None:
        if frame.strategy is not strategy.identity:
            raise ContextError(
                f"`{method}` of {strategy!r} was called in the scope of another strategy. "
                f"Current context: {frame}. Leave that scope first: strategies do not nest."
            )
        raise ContextError(
            f"`{method}` needs cross-replica context. Current context: {frame}. Call it outside "
            "the function given to `run`, or from a function given to "
            "`rx.get_replica_context().merge_call(...)`."
        )
    return replace(frame, strategy=strategy.identity, kind=ContextKind.CROSS_REPLICA)
