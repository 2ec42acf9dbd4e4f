"""The libraries that data can come from, with one file per library."""

from __future__ import annotations

from replicax.errors import InvalidType
from replicax.input._source import Source
from replicax.input.sources import _calls, _grain, _iterable, _tf_data, _torch
from replicax.input.sources._calls import Calls
from replicax.input.sources._grain import is_sparse

# They are tried in this order; the last takes any iterable. Each returns None for datasets that
# are not its own. They do not import their libraries: the code that made a dataset already has.
_LIBRARIES = (_grain.recognise, _tf_data.recognise, _torch.recognise)
_RECOGNISERS = (*_LIBRARIES, _calls.recognise, _iterable.recognise)


def of_a_library(data: object) -> bool:
    """Tell whether `data` is a dataset of one of the libraries, and not just an iterable."""
    return any(recognise(data) is not None for recognise in _LIBRARIES)


def source_of(dataset: object) -> Source:
    """Return the source that reads `dataset`."""
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
