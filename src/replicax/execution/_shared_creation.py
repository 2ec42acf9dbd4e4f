"""Objects that the first replica of an eager run makes for all of them, such as variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from replicax.errors import CollectiveMismatch
from replicax.execution._call_site import CallSite, call_site

if TYPE_CHECKING:
    from replicax._typing import StrategyLike, Values


class Key(NamedTuple):
    """A replica that creates an object, its call site, and its turn there.

    The first replica runs up to the next meeting before the others do, so what they create at the
    same place is the same object, even if a condition (`if "v" not in made`) makes them skip others
    that were made before.
    """

    replica: int
    site: CallSite
    turn: int


@final
class SharedCreations:
    """The objects that the first replica has made, by call site and turn."""

    def __init__(self) -> None:
        self._made: dict[tuple[CallSite, int], tuple[str, object, Exception | None]] = {}
        self._turns: Counter[tuple[int, CallSite]] = Counter()

    def next_key(self, replica: int) -> Key:
        """Return the key of an object that a replica is about to create."""
        here = call_site(depth=1, until="_perform")  # `_perform` begins a replica's code.
        self._turns[replica, here] += 1
        return Key(replica, here, self._turns[replica, here])

    def note(self, key: Key, label: str, make: Callable[[], Values]) -> Values:
        """Make an object for the first replica, and keep it, or the error, for the others."""
        try:
            result = make()
        except Exception as error:
            self._made[key.site, key.turn] = label, None, error
            raise
        self._made[key.site, key.turn] = label, result, None
        return result

    def find(self, key: Key, label: str, strategy: StrategyLike) -> Any:
        """Return the object that the first replica created at the same place."""
        made, result, error = self._made.get((key.site, key.turn), (None, None, None))
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
