"""The variables of a strategy as a table: where the bytes of its state are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from replicax._hints import hint
from replicax._once import first_time
from replicax._units import of_bytes, of_share
from replicax.topology import Topology
from replicax.variables import StateLayout, Storage, Variable, storage_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replicax.strategies._strategy import Strategy

# A state smaller than this fits everywhere, however it is laid out.
_WORTH_A_HINT = 1024 * 1024
_NAMED = 3  # the most variables that a hint names


@final
@dataclass(frozen=True, slots=True)
class DescribedVariable:
    """A row of a `VariableTable`.

    Args:
      name: The name of the variable.
      shape: The shape of its value, without padding.
      dtype: The type of the elements.
      layout: "replicated", "sharded", "per replica" (ON_READ: a copy of its own on every replica),
        or "one copy".
      parts: The number of parts of each dimension, over replicas or over logical devices.
      bytes: The bytes of the value.
      bytes_per_device: The bytes that a device holds, if it has a part or a copy. All parts of a
        divided variable are equally large, so the padding of the last ones counts too.
      adopted: Whether another library, Keras or Flax, keeps the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    layout: str
    parts: tuple[int, ...]
    bytes: int
    bytes_per_device: int
    adopted: bool

    def layout_in_words(self) -> str:
        """Return the layout, and which dimensions are divided."""
        divided = [f"dim {axis} in {count}" for axis, count in enumerate(self.parts) if count > 1]
        return ", ".join([self.layout, *divided])


@final
@dataclass(frozen=True, slots=True)
class VariableTable:
    """The variables of a strategy in the order of their creation; `print` shows a table.

    `strategy.extended.describe_variables()` makes it.
    """

    rows: tuple[DescribedVariable, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all values, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The bytes of all variables that one device holds.

        Under `CentralStorageStrategy`, this is a device that holds both the single copies of
        variables and a replica's ON_READ copies.
        """
        return sum(row.bytes_per_device for row in self.rows)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        from replicax._tables import empty_table

        count = len(self.rows)
        table = empty_table(f"{count} variable{'' if count == 1 else 's'}")
        table.add_column("name", overflow="fold")
        table.add_column("shape")
        table.add_column("dtype", no_wrap=True)
        table.add_column("layout")
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("per device", justify="right", no_wrap=True)
        for row in self.rows:
            # As `Text`, because a name may have brackets, which `rich` would take for markup.
            cells = (row.name, str(row.shape), str(row.dtype), row.layout_in_words())
            table.add_row(*map(Text, cells), of_bytes(row.bytes), of_bytes(row.bytes_per_device))
        table.add_section()
        table.add_row("in all", "", "", "", of_bytes(self.bytes), of_bytes(self.bytes_per_device))
        return table

    def __str__(self) -> str:
        from replicax._tables import as_text

        return as_text(self.__rich__())


def table_of(variables: Iterable[Variable], topology: Topology) -> VariableTable:
    """Return the table of a strategy's variables over `topology`."""
    return VariableTable(tuple(_described(variable, topology) for variable in variables))


def hint_of_whole_state(strategy: Strategy, table: VariableTable) -> None:
    """Hint, once per strategy, at state that is kept whole but should be divided."""
    rows = [row for row in table.rows if row.layout != StateLayout.PER_REPLICA.value]
    state = sum(row.bytes for row in rows)
    whole = [row for row in rows if row.layout != StateLayout.SHARDED.value]
    kept = sum(row.bytes for row in whole)
    if state < _WORTH_A_HINT or 10 * kept <= state:
        return
    if not first_time("state that is kept whole", about=strategy):
        return
    largest = sorted(whole, key=lambda row: -row.bytes)
    named = [
        f"{row.name!r} ({of_bytes(row.bytes)}{', of Keras or Flax' if row.adopted else ''})"
        for row in largest[:_NAMED]
    ]
    more = [f"{len(largest) - _NAMED} more"] if len(largest) > _NAMED else []
    hint(
        f"{strategy!r} keeps {of_bytes(kept)} of its state, {of_share(kept / state)}, whole on "
        f"every device: {', '.join(named + more)}. Whole are variables under 64 KiB, those "
        "that the `variable_partitioner` leaves in one part, and those of Keras or Flax that have "
        "no dimension that divides by the number of replicas, or that several workers share. Give "
        "a `variable_partitioner` that divides more, or such variables other dimensions."
    )


def _described(variable: Variable, topology: Topology) -> DescribedVariable:
    storage, shape = storage_of(variable), variable.shape
    array = storage.array_shape(inside=False, topology=topology)
    part = storage.sharding(topology).shard_shape(array)
    itemsize = variable.dtype.itemsize
    return DescribedVariable(
        variable.name,
        shape,
        variable.dtype,
        "one copy" if storage.num_copies is None else storage.layout.value,
        _parts(storage, array, part),
        math.prod(shape) * itemsize,
        math.prod(part) * itemsize,
        adopted=not storage.reusable,
    )


def _parts(storage: Storage, array: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of parts of each dimension of the value."""
    if storage.layout is StateLayout.PER_REPLICA:  # its array is all replicas' values in a row
        return (1,) * len(storage.shape)
    return tuple(size // own if own else 1 for size, own in zip(array, part, strict=True))
