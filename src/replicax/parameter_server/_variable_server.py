"""What runs on a parameter server: arrays, and changes that are applied exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from replicax.parameter_server._operations import WriteTo


@final
class VariableServer:
    """The arrays of one server, by number.

    Ray calls the methods one after another, so each is atomic. Changes that belong to a closure are
    applied once: a closure that is run again, because its worker was lost, finds its number here.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}
        self._applied: set[int] = set()
        self._settled = 0

    def create(self, number: int, value: np.ndarray) -> None:
        """Keep an array under a number."""
        self._arrays[number] = np.array(value)

    def forget(self, number: int) -> None:
        """Remove an array that nothing refers to any more."""
        self._arrays.pop(number, None)

    def read(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Return the values of arrays at one moment."""
        return [self._arrays[number] for number in numbers]

    def apply(self, closure: int | None, settled: int, writes: Sequence[WriteTo]) -> bool:
        """Apply the changes of a closure, all or none; tell whether they are new.

        Args:
          closure: Its number; None for changes that are never sent again.
          settled: All closures with smaller numbers are done. What still arrives from one of them
            comes from a worker that was given up.
          writes: The changes, in order.
        """
        self._settled = max(self._settled, settled)
        self._applied = {number for number in self._applied if number >= self._settled}
        if closure is not None and (closure < self._settled or closure in self._applied):
            return False
        self._require_fitting(writes)
        for each in writes:
            array = self._arrays[each.array]
            if each.write == "assign":
                array[...] = each.value
            elif each.write == "assign_add":
                np.add(array, each.value, out=array)
            else:
                np.subtract(array, each.value, out=array)
        if closure is not None:
            self._applied.add(closure)
        return True

    def status(self) -> Mapping[str, int]:
        """Return counts of what is kept here."""
        return {
            "arrays": len(self._arrays),
            "bytes": sum(array.nbytes for array in self._arrays.values()),
            "closures": len(self._applied),
        }

    def _require_fitting(self, writes: Sequence[WriteTo]) -> None:
        """Refuse writes that would fail half-way."""
        for each in writes:
            array = self._arrays[each.array]
            if (each.value.shape, each.value.dtype) != (array.shape, array.dtype):
                raise ValueError(
                    f"array {each.array} is {array.dtype}{list(array.shape)}; got "
                    f"{each.value.dtype}{list(each.value.shape)}"
                )
