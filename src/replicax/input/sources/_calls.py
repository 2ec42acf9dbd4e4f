"""Functions that return one element per call, which the input functions of v1 may return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import final

from replicax._typing import Json, Nest
from replicax.errors import InvalidArgument, InvalidType
from replicax.input._ending import EndOfData
from replicax.input._source import Reader, Source, fields_of, numpy_of


@final
class Calls:
    """A dataset of the results of a function, call by call, until it raises StopIteration.

    It cannot start over: a pass continues where the previous one ended.
    """

    def __init__(self, function: Callable[[], Nest]) -> None:
        self.function = function


def recognise(dataset: object) -> Source | None:
    return _CallSource(dataset.function) if isinstance(dataset, Calls) else None


@final
class _CallSource(Source):
    def __init__(self, function: Callable[[], Nest]) -> None:
        self._function = function
        self._calls = 0
        self._started = False
        # The thread of a pass that was closed may still be in the function.
        self._calling = threading.Lock()

    @property
    def continues(self) -> bool:
        return True

    def start(self, state: object = None) -> Reader:
        calls = 0 if state is None else fields_of(state, "calls")[0]
        if calls and self._started:
            raise InvalidArgument(
                "A function that gives elements cannot begin again, and this iterator has been "
                f"initialized; got a state after {calls} call(s). Set the state of a new iterator "
                "before it is initialized, or have the input function return a dataset."
            )
        self._started = True
        return _CallReader(self, calls)

    def call(self, calls_before: int) -> tuple[Nest, int]:
        """Return the function's next result, and the number of calls so far.

        If there were fewer than `calls_before`, the results up to there are skipped.
        """
        with self._calling:
            while self._calls < calls_before:
                try:
                    self._called()
                except StopIteration:  # the end of an earlier pass
                    continue
            return self._called(), self._calls

    def _called(self) -> Nest:
        self._calls += 1
        element = self._function()
        if isinstance(element, Iterator):
            raise InvalidType(
                f"The function {self._function!r} returned a {type(element).__name__}, and is to "
                "return an element each time it is called. Have the input function return a "
                "generator function or a list, which is iterated over."
            )
        return numpy_of(element)


@final
class _CallReader(Reader):
    def __init__(self, source: _CallSource, calls: int) -> None:
        self._source = source
        self._calls = calls

    def read(self) -> Nest:
        try:
            element, self._calls = self._source.call(self._calls)
        except StopIteration as stop:  # by which these functions signal the end
            raise EndOfData from stop
        return element

    def get_state(self) -> Json:
        return {"calls": self._calls}
