"""Where data can come from: one file a library."""

from __future__ import annotations

from typing import Any

from replicax.errors import InvalidType
from replicax.input._source import Source
from replicax.input.sources import _calls, _grain, _iterable, _tf_data, _torch
from replicax.input.sources._calls import Calls
from replicax.input.sources._grain import is_sparse

# In this order; the last takes any iterable. Each answers None for what is not its own, and none
# imports its library: whoever made such a dataset has done that.
_LIBRARIES = (_grain.recognise, _tf_data.recognise, _torch.recognise)
_RECOGNISERS = (*_LIBRARIES, _calls.recognise, _iterable.recognise)


def of_a_library(data: Any) -> bool:
    """Whether `data` is a dataset of one of the libraries, and not just something iterable."""
    return any(recognise(data) is not None for recognise in _LIBRARIES)


def source_of(dataset: Any) -> Source:
    """The source that reads `dataset`."""
    for recognise in _RECOGNISERS:
        source = recognise(dataset)
        if source is not None:
            return source
    raise InvalidType(
        f"{type(dataset).__name__} is no dataset: {dataset!r}. Give a Grain dataset, a "
        "`tf.data.Dataset`, a PyTorch `DataLoader`, a list or another re-iterable of batches, or a "
        "function that returns a new iterator."
    )


__all__ = ["Calls", "is_sparse", "of_a_library", "source_of"]
