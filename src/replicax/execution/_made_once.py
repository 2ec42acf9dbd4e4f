"""What the first replica of an eager run makes for all of them, such as a variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from replicax.errors import CollectiveMismatch
from replicax.execution._place import Place, place

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


class Key(NamedTuple):
    """Which replica makes something, at which place, for the how many-th time.

    The first replica runs up to the next meeting before the others do, so theirs at the same place
    is the same thing, also where a condition (`if "v" not in made`) lets them pass by what was made
    before.
    """

    replica: int
    place: Place
    turn: int


@final
class MadeOnce:
    """Keeps what the first replica has made, by place and turn."""

    def __init__(self) -> None:
        self._made: dict[tuple[Place, int], tuple[str, Any, Exception | None]] = {}
        self._turns: Counter[tuple[int, Place]] = Counter()

    def next_key(self, replica: int) -> Key:
        """Return the key of what a replica is about to make; to be called at one place for all."""
        here = place(depth=1, until="_perform")  # which begins a replica's code
        self._turns[replica, here] += 1
        return Key(replica, here, self._turns[replica, here])

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
