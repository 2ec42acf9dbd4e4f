"""The weight of each replica's rows in a mean over all of them."""

from __future__ import annotations

from collections.abc import Sequence


def row_weights(
    shapes_per_leaf: Sequence[Sequence[tuple[int, ...]]], num_replicas: int
) -> list[float]:
    """Return the weights with which the mean of the replicas' means is the mean over all rows.

    A weight is the replica's fraction of all rows, times the number of replicas: 1.0 for equal
    shares. A replica without rows has 0.0. If the number of rows is not known, because values
    disagree on it or have none, all replicas count the same.

    Args:
      shapes_per_leaf: For each distributed value, the shape of every replica's component.
      num_replicas: The number of replicas.

    >>> row_weights([[(3, 2), (1, 2)], [(3,), (1,)], [(), ()]], 2)
    [1.5, 0.5]
    """
    rows = {tuple(shape[0] for shape in shapes) for shapes in shapes_per_leaf if all(shapes)}
    if len(rows) != 1 or any(any(shapes) and not all(shapes) for shapes in shapes_per_leaf):
        return [1.0] * num_replicas
    (counts,) = rows
    total = sum(counts)
    return [count * num_replicas / total if count else 0.0 for count in counts]
