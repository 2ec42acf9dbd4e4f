"""The weight of each replica's rows in a mean over all of them."""

from __future__ import annotations

from collections.abc import Sequence


def row_weights(
    shapes_per_leaf: Sequence[Sequence[tuple[int, ...]]], num_replicas: int
) -> list[float]:
    """Return the weight of each replica's mean, such that the mean of all is that over the rows.

    That is the replica's part of all rows, times the number of replicas: 1.0 for equal shares. A
    replica without rows has 0.0. Where the rows are not known, because the values differ in them or
    have none, all replicas count the same.

    Args:
      shapes_per_leaf: Of each distributed value, the shape of every replica's component.
      num_replicas: How many replicas there are.

    >>> row_weights([[(3, 2), (1, 2)], [(3,), (1,)], [(), ()]], 2)
    [1.5, 0.5]
    """
    rows = {tuple(shape[0] for shape in shapes) for shapes in shapes_per_leaf if all(shapes)}
    if len(rows) != 1 or any(any(shapes) and not all(shapes) for shapes in shapes_per_leaf):
        return [1.0] * num_replicas
    (counts,) = rows
    total = sum(counts)
    return [count * num_replicas / total if count else 0.0 for count in counts]
