"""All servers of a strategy, as the chief and the workers see them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from replicax.errors import ServerLost
from replicax.parameter_server._actors import Actor, ActorLost, Reply
from replicax.parameter_server._operations import Change

# Longer than any read or write takes; a server that is stopped, and has not ended, is found by it.
_ANSWER_SECONDS = 60.0


@final
class Servers:
    """The servers, by index. It can be pickled, and reads and changes arrays in other processes.

    Args:
      actors: Their actors.
      places: Where each of them is, for messages.
    """

    def __init__(self, actors: Sequence[Actor], places: Sequence[str]) -> None:
        self._actors, self._places = actors, places
        self._numbers = itertools.count()
        self._forgotten: collections.deque[tuple[int, int]] = collections.deque()

    def __reduce__(self) -> Any:
        return Servers, (self._actors, self._places)

    def __len__(self) -> int:
        return len(self._actors)

    def create(self, index: int, value: np.ndarray) -> int:
        """Keep an array on a server, and return its number there."""
        self._remove_forgotten()
        number = next(self._numbers)
        self._result(index, self._actors[index].ask("create", number, value))
        return number

    def forget(self, index: int, number: int) -> None:
        """Note that an array is not needed any more; it is removed with the next change.

        Python may call this wherever it collects garbage, so it must not wait for anything.
        """
        self._forgotten.append((index, number))

    def _remove_forgotten(self) -> None:
        while self._forgotten:
            index, number = self._forgotten.popleft()
            self._actors[index].ask("forget", number)

    def read(self, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], np.ndarray]:
        """Return arrays, each at its server and number; those of one server are of one moment."""
        wanted: dict[int, list[int]] = {}
        for index, number in places:
            wanted.setdefault(index, []).append(number)
        replies = [(i, self._actors[i].ask("read", numbers)) for i, numbers in wanted.items()]
        return {
            (index, number): array
            for index, reply in replies
            for number, array in zip(wanted[index], self._result(index, reply), strict=True)
        }

    def read_rows(self, rows: Sequence[tuple[int, int, np.ndarray]]) -> list[np.ndarray]:
        """Return some rows of arrays, each given by its server, its number and the rows."""
        replies = [
            (index, self._actors[index].ask("read_rows", number, wanted))
            for index, number, wanted in rows
        ]
        return [self._result(index, reply) for index, reply in replies]

    def learn(self, index: int, exported: bytes, x64: bool) -> int:
        """Have a server keep a program for updates, and return its number there."""
        number = next(self._numbers)
        self._result(index, self._actors[index].ask("learn", number, exported, x64))
        return number

    def apply(
        self, changes: Mapping[int, Sequence[Change]], closure: int | None = None, settled: int = 0
    ) -> None:
        """Have the servers, by index, apply changes; wait until all have."""
        self._remove_forgotten()
        replies = [
            (index, self._actors[index].ask("apply", closure, settled, list(each)))
            for index, each in changes.items()
        ]
        for index, reply in replies:
            self._result(index, reply)

    def _result(self, index: int, reply: Reply) -> Any:
        try:
            return reply.result(_ANSWER_SECONDS)
        except (ActorLost, TimeoutError) as error:
            raise ServerLost(
                f"Parameter server {index} ({self._places[index]}) is lost: {error}. Its variables "
                "are lost with it. Start the program again from its last checkpoint: see "
                "docs/parameter_servers.md."
            ) from None
