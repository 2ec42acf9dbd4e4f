"""The object that runs on a parameter server: arrays, and changes, applied exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from replicax.parameter_server._operations import Change, UpdateOf, WriteTo


@final
class VariableServer:
    """The arrays of one server, by number.

    Ray calls the methods one after another, so each is atomic. Changes that belong to a closure are
    applied once: a closure that is run again, because its worker was lost, finds its number here.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}
        self._programs: dict[int, Any] = {}
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

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Return some rows of an array."""
        return self._arrays[number][rows]

    def learn(self, number: int, exported: bytes, x64: bool) -> None:
        """Keep a program for updates, as `jax.export` has written it.

        Args:
          number: The number of the program.
          exported: The program.
          x64: Whether it was traced with 64-bit numbers.
        """
        import jax  # most servers need it for nothing else
        from jax import export

        jax.config.update("jax_enable_x64", x64)
        self._programs[number] = jax.jit(export.deserialize(bytearray(exported)).call)

    def apply(self, closure: int | None, settled: int, changes: Sequence[Change]) -> bool:
        """Apply the changes of a closure, all or none; tell whether they are new.

        Args:
          closure: Its number; None for changes that are never sent again.
          settled: All closures with smaller numbers are done. What still arrives from one of them
            comes from a worker that was given up.
          changes: The changes, in order.
        """
        self._settled = max(self._settled, settled)
        self._applied = {number for number in self._applied if number >= self._settled}
        if closure is not None and (closure < self._settled or closure in self._applied):
            return False
        self._require_fitting(changes)
        # Writes cannot fail any more, and change arrays where they are; updates might.
        updates = any(isinstance(change, UpdateOf) for change in changes)
        arrays = dict(self._arrays) if updates else self._arrays
        copied: set[int] = set()
        for change in changes:
            if isinstance(change, UpdateOf):
                values = [arrays[number] for number in change.arrays]
                results = self._programs[change.program](*values, *change.operands)
                for number, result in zip(change.changed, results, strict=True):
                    arrays[number] = np.array(result)
                    copied.add(number)
            else:
                if updates and change.array not in copied:
                    arrays[change.array] = arrays[change.array].copy()
                    copied.add(change.array)
                _write(arrays[change.array], change)
        self._arrays = arrays
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

    def _require_fitting(self, changes: Sequence[Change]) -> None:
        """Refuse writes that would fail half-way."""
        for change in changes:
            if isinstance(change, UpdateOf):
                continue
            array, value = self._arrays[change.array], change.value
            rows = array.shape[:1] if change.rows is None else change.rows.shape
            if (value.shape, value.dtype) != ((*rows, *array.shape[1:]), array.dtype):
                raise ValueError(
                    f"array {change.array} is {array.dtype}{list(array.shape)}; got "
                    f"{value.dtype}{list(value.shape)}"
                )


def _write(array: np.ndarray, change: WriteTo) -> None:
    if change.rows is not None:
        operation = np.add if change.write == "assign_add" else np.subtract
        operation.at(array, change.rows, change.value)
    elif change.write == "assign":
        array[...] = change.value
    elif change.write == "assign_add":
        np.add(array, change.value, out=array)
    else:
        np.subtract(array, change.value, out=array)
