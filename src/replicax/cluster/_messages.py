"""The messages between the workers and the hub, and their format: one JSON object per line.

The format is JSON because reading it runs no code, even from an untrusted sender. A line is checked
against the fields of its class when it is read, so that the rest of the code handles values of
known types.
"""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib import metadata
from typing import Any, Union, get_args, get_origin, get_type_hints

LARGEST_PUT = 16 * 1024 * 1024  # bytes of a message with a worker's value
# The limit for any message: the hub passes values on in slightly longer ones.
LARGEST_LINE = LARGEST_PUT + 4096
# The reason why a worker no longer takes part, if there was nothing left to do.
FINISHED = "has finished its program"
_LARGEST_NUMBER = 2**53  # JSON numbers are exact up to here in every reader


class InvalidMessage(ValueError):
    """A line that is not a message, or a message too large to be sent; the text says why."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all workers for their programs to be equal."""
    return {name: metadata.version(name) for name in ("replicax", "jax", "jaxlib")}


# From a worker to the hub.


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's introduction, the first message on a connection."""

    index: int
    addresses: tuple[str, ...]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Unreached:
    """A worker that does not accept a connection at this address."""

    worker: int
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Look:
    """The workers that one worker could not reach when it looked, in collective `number`.

    `round` is 1 for the first look in it, 2 for a look after another `timeout_seconds`, and so on.
    """

    number: int
    round: int
    unreached: tuple[Unreached, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The activity of a worker, sent every second."""

    number: int
    label: str
    waits: str | None
    seconds: float
    where: tuple[str, ...]
    look: Look | None = None  # the last one, if the worker had reason to look


@dataclass(frozen=True, slots=True)
class Put:
    """A worker's value for a topic: JSON in a string, because the hub never looks into it."""

    topic: str
    value: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The worker no longer waits for this topic."""

    topic: str


@dataclass(frozen=True, slots=True)
class AskState:
    """A question about the state of all workers."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker has reached the end of its program, after `number` collectives."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends because its program failed.

    `secondary` says that it failed only because another worker had ended or failed.
    """

    reason: str
    secondary: bool


@dataclass(frozen=True, slots=True)
class TakeLeave:
    """The worker has left JAX's service."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The worker was asked to stop, and wants all to stop at the same step."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The number of times that the worker has asked whether to stop and been answered."""

    calls: int


# From the hub to a worker.


@dataclass(frozen=True, slots=True)
class Welcome:
    """All workers are here; the address is that of JAX's service."""

    coordinator: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The hub ends the connection, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A process that tried to join the cluster was refused, while others still wait for it.

    The reason is a sentence that names the identity it claimed.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer to a report, a sign of life."""


@dataclass(frozen=True, slots=True)
class Value:
    """One worker's value for a topic to which all workers have contributed."""

    topic: str
    worker: int
    value: str


@dataclass(frozen=True, slots=True)
class Void:
    """A topic for which `worker` will not publish a value, because it has ended."""

    topic: str
    worker: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that no longer takes part."""

    worker: int
    reason: str
    finished_after: int | None = None  # collectives; None unless it has finished its program
    secondary: bool = False  # whether it failed because of another worker

    @property
    def finished(self) -> bool:
        """True if the worker ended because there was nothing left to do."""
        return self.finished_after is not None


@dataclass(frozen=True, slots=True)
class Left:
    """A worker has left JAX's service."""

    worker: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of a worker has ended, and with it the process."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The hub's knowledge of one worker."""

    silent: float  # seconds since it was last heard from
    report: Report | None
    ended: str | None


@dataclass(frozen=True, slots=True)
class State:
    """The hub's view: each worker's state, the missing values, and the workers yet to arrive."""

    workers: tuple[WorkerState, ...]
    missing: dict[str, tuple[int, ...]]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deciding:
    """A request to answer no further questions until the stopping point is known."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The number of the question at which all workers stop."""

    at: int


ToHub = (
    Hello | Report | Put | Withdraw | AskState | Finished | Failed | TakeLeave | Preempted | Calls
)
FromHub = (
    Welcome
    | Refused
    | TurnedAway
    | Beat
    | Value
    | Void
    | Ended
    | Left
    | Disconnected
    | State
    | Deciding
    | Stop
)
Message = ToHub | FromHub
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the line for a message; raise `InvalidMessage` if it is too large."""
    content = {"kind": type(message).__name__, **asdict(message)}
    line = json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    largest = LARGEST_PUT if isinstance(message, Put) else LARGEST_LINE
    if len(line) > largest:
        raise InvalidMessage(
            f"a message of kind {content['kind']} has {len(line):,} bytes, and {largest:,} is the "
            "most"
        )
    return line


def decode(line: bytes) -> Message:
    """Return the message in a line; raise `InvalidMessage` if there is none."""
    if not line.endswith(b"\n"):
        raise InvalidMessage("the line is cut off")
    try:
        content = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidMessage("the JSON is nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with thousands of digits
        raise InvalidMessage(f"the line is no JSON that is accepted here: {error}") from None
    if not isinstance(content, dict):
        raise InvalidMessage(f"a message is a JSON object; got {_shown(content)}")
    kind = content.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidMessage(f"there is no message of kind {_shown(kind)}")
    return _object(_KINDS[kind], content, kind)


def _refuse_constant(name: str) -> None:
    raise InvalidMessage(f"{name} is no number of JSON")


def _object(kind: Any, content: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(content, dict) or content.keys() != hints.keys():
        raise InvalidMessage(f"{where} has the fields {sorted(hints)}; got {_shown(content)}")
    return kind(
        **{name: _checked(hint, content[name], f"{where}.{name}") for name, hint in hints.items()}
    )


@cache
def _hints(kind: Any) -> dict[str, object]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _checked(hint: Any, value: Any, where: str) -> Any:
    """Return `value` as the type that the annotation of a message's field demands."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # always of a type and None
        return None if value is None else _checked(arguments[0], value, where)
    if is_dataclass(hint):
        return _object(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _checked(arguments[1], item, where) for key, item in value.items()}
    if hint in (str, bool) and isinstance(value, hint):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and abs(value) <= _LARGEST_NUMBER  # false for NaN and infinity
    if in_range and (hint is float or (hint is int and int(value) == value)):
        return hint(value)
    raise InvalidMessage(f"{where} must be {_name(hint)}; got {_shown(value)}")


def _name(hint: Any) -> str:
    return hint.__name__ if get_origin(hint) is None else str(hint)


def _shown(value: object) -> str:
    """Return the beginning of a value's repr, or its type if it has none, as for a huge number."""
    try:
        return f"{value!r}"[:80]
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"
