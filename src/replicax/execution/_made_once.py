"""What the first replica of an eager run makes for all of them, such as a variable."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, final

from replicax.errors import CollectiveMismatch

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

# Where something is made: the instruction in each function that is running. The first replica runs
# up to the next meeting before the others do, so theirs at the same place is the same thing, also
# where a condition (`if "v" not in made`) lets them pass by what was made before.
_Place = tuple[tuple[CodeType, int], ...]


class Key(NamedTuple):
    """Which replica makes something, at which place, for the how many-th time."""

    replica: int
    place: _Place
    turn: int


@final
class MadeOnce:
    """Keeps what the first replica has made, by place and turn."""

    def __init__(self) -> None:
        self._made: dict[tuple[_Place, int], tuple[str, Any, Exception | None]] = {}
        self._turns: Counter[tuple[int, _Place]] = Counter()

    def next_key(self, replica: int) -> Key:
        """Return the key of what a replica is about to make; to be called at one place for all."""
        place = _place()
        self._turns[replica, place] += 1
        return Key(replica, place, self._turns[replica, place])

    def note(self, key: Key, label: str, make: Callable[[], Any]) -> Any:
        """Make something for the first replica, and keep it, or the error, for the others."""
        try:
            result = make()
        except Exception as error:
            self._made[key.place, key.turn] = label, None, error
            raise
        self._made[key.place, key.turn] = label, result, None
        return result

    def find(self, key: Key, label: str, strategy: StrategyLike) -> Any:
        """Return what the first replica has made at the same place."""
        made, result, error = self._made.get((key.place, key.turn), (None, None, None))
        if made != label:
            raise CollectiveMismatch(
                f"The replicas of {strategy!r} do not agree on what to do together: replica "
                f"{key.replica} called {label}, and replica 0 "
                f"{'did not' if made is None else f'called {made}'}, at this place. Every replica "
                "must create the same variables; look for a condition, a name or a shape that "
                "depends on the replica or on its data."
            )
        if error is not None:
            raise error
        return result


def _place() -> _Place:
    """Return the instructions that led to the caller's caller, since a replica began to run."""
    frame, path = sys._getframe(2), []
    while frame is not None and frame.f_code.co_name != "_perform":
        path.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(path)
