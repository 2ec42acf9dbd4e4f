"""Where an iterator takes its elements from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from replicax import _nest
from replicax._typing import Nest
from replicax.cluster import Progress
from replicax.input._prefetch import Ahead

Prepared = tuple[Nest, dict[str, Any]]  # an element, and where the pass stands after it


class Elements(Protocol):
    """Where an iterator takes its elements from."""

    def peek(self, count: int) -> list[Prepared]: ...

    def take(self) -> Prepared: ...

    def close(self) -> None: ...


@final
class Watched:
    """Takes from another one, and lets the watchdog know that the program waits."""

    def __init__(self, elements: Ahead[Prepared], progress: Progress) -> None:
        self._elements = elements
        self._progress = progress

    def peek(self, count: int) -> list[Prepared]:
        with self._progress.for_element(self._elements.reader):
            return self._elements.peek(count)

    def take(self) -> Prepared:
        with self._progress.for_element(self._elements.reader):
            return self._elements.take()

    def close(self) -> None:
        self._elements.close()


@final
class Keeping:
    """Takes from another one, and gives all of it away to be kept when it comes to the end."""

    def __init__(self, elements: Elements, keep: Callable[[list[Prepared]], None]) -> None:
        self._elements = elements
        self._keep = keep
        self._seen: list[Prepared] = []

    def peek(self, count: int) -> list[Prepared]:
        return self._elements.peek(count)

    def take(self) -> Prepared:
        try:
            prepared = self._elements.take()
        except StopIteration:
            self._keep(self._seen)
            raise
        self._seen.append(_apart(prepared))
        return prepared

    def close(self) -> None:
        self._elements.close()


@final
class FromMemory:
    """Takes from what was kept."""

    def __init__(self, kept: list[Prepared], position: int) -> None:
        self._kept = kept
        self._rest: Iterator[Prepared] = iter(kept[position:])
        self._position = position

    def peek(self, count: int) -> list[Prepared]:
        return self._kept[self._position : self._position + count]

    def take(self) -> Prepared:
        prepared = next(self._rest)
        self._position += 1
        return _apart(prepared)

    def close(self) -> None:
        return


def _apart(prepared: Prepared) -> Prepared:
    """The same arrays in containers of their own, which the user may change."""
    element, state = prepared
    return _nest.transform(lambda leaf: leaf, element), state
