"""`rx.compat.v1.data`: iterators over distributed datasets, as `tf.compat.v1.data` makes them."""

from __future__ import annotations

from replicax._public import publish as _publish
from replicax.errors import InvalidType
from replicax.input import DistributedDataset, InitializableIterator


def make_initializable_iterator(
    dataset: DistributedDataset, shared_name: object = None
) -> InitializableIterator:
    """Return an uninitialized iterator over a distributed dataset.

    Args:
      dataset: A distributed dataset.
      shared_name: Accepted but ignored, as there are no sessions to share the iterator.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.compat.v1.OneDeviceStrategy("CPU:0")
    >>> dataset = strategy.experimental_distribute_dataset([np.int32([1, 2]), np.int32([3, 4])])
    >>> iterator = rx.compat.v1.data.make_initializable_iterator(dataset)
    >>> operations = iterator.initializer
    >>> print(iterator.get_next())
    [1 2]
    >>> iterator.close()
    """
    if not isinstance(dataset, DistributedDataset):
        raise InvalidType(
            "`make_initializable_iterator` needs a distributed dataset; got a "
            f"{type(dataset).__name__}. Distribute it first: "
            "`strategy.experimental_distribute_dataset(dataset)`."
        )
    return InitializableIterator(dataset)


__all__ = ["make_initializable_iterator"]

_publish(globals())
