"""The supplies that an iterator takes its elements from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, final

from replicax import _nest
from replicax._typing import Json, Nest
from replicax.cluster import Session
from replicax.input._prefetch import Prefetcher

Prepared = tuple[Nest, dict[str, Json]]  # an element, and the position in the pass after it


class ElementSupply(Protocol):
    """A supply of elements for an iterator."""

    def peek(self, count: int) -> list[Prepared]: ...

    def take(self) -> Prepared: ...

    def close(self) -> None: ...


@final
class WatchedSupply:
    """Elements of another supply, for several workers: their watchdog knows of every wait."""

    def __init__(self, elements: Prefetcher[Prepared], session: Session) -> None:
        self._elements = elements
        self._session = session

    def peek(self, count: int) -> list[Prepared]:
        with self._waiting():
            return self._elements.peek(count)

    def take(self) -> Prepared:
        with self._waiting():
            return self._elements.take()

    def _waiting(self) -> AbstractContextManager[None]:
        """Tell the watchdog, for a `with` block, that the program waits for an element."""
        self._session.catch_up()
        return self._session.progress.for_element(self._elements.reader)

    def close(self) -> None:
        self._elements.close()


@final
class CachingSupply:
    """Elements of another supply, which are cached when it ends."""

    def __init__(self, elements: ElementSupply, cache: Callable[[list[Prepared]], None]) -> None:
        self._elements = elements
        self._cache = cache
        self._seen: list[Prepared] = []

    def peek(self, count: int) -> list[Prepared]:
        return self._elements.peek(count)

    def take(self) -> Prepared:
        try:
            prepared = self._elements.take()
        except StopIteration:
            self._cache(self._seen)
            raise
        self._seen.append(_apart(prepared))
        return prepared

    def close(self) -> None:
        self._elements.close()


@final
class CachedSupply:
    """Elements that were cached."""

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
    """Return the same arrays in new containers, which the user may change."""
    element, state = prepared
    return _nest.transform(lambda leaf: leaf, element), state
