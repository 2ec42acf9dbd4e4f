"""Input: from datasets of any library to elements with a part for every replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax._enums import AutoShardPolicy, InputReplicationMode, PartialBatches
from replicax._typing import Nest
from replicax.input._dataset import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    DistributedDataset,
    distribute,
    distribute_from_function,
)
from replicax.input._iterator import (
    DistributedIterator,
    InitializableIterator,
    Optional,
    require_iterator,
)
from replicax.input._memory import aligned
from replicax.input._options import InputContext, InputOptions
from replicax.input._row_splitting import count_rows, shares
from replicax.input.sources import Calls, of_a_library

if TYPE_CHECKING:
    from replicax.input._pipeline import Pipeline


def from_tensor_slices(arrays: Nest) -> Pipeline:
    """Make a Grain dataset of the rows of a nest of arrays.

    In addition to the methods of a `grain.MapDataset`, it has `take`, `skip`, `shard`,
    `enumerate`, `zip`, `cache` and `prefetch`. The seed of `shuffle` is keyword-only.

    The arrays are copied, as in TensorFlow, so that later writes to them do not show; an
    `np.memmap` is not copied.

    >>> import numpy as np, replicax as rx
    >>> images, labels = np.zeros((5, 8, 8)), np.arange(5)
    >>> dataset = rx.from_tensor_slices({"image": images, "label": labels}).batch(2)
    >>> [batch["label"].tolist() for batch in dataset]
    [[0, 1], [2, 3], [4]]
    """
    from replicax.input._arrays import ArrayDataset  # these import Grain, 0.2 s
    from replicax.input._pipeline import Pipeline

    return Pipeline(ArrayDataset(arrays))


__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Calls",
    "DistributedDataset",
    "DistributedIterator",
    "InitializableIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "PartialBatches",
    "aligned",
    "count_rows",
    "distribute",
    "distribute_from_function",
    "from_tensor_slices",
    "of_a_library",
    "require_iterator",
    "shares",
]
