"""PyTorch: `torch.utils.data.DataLoader`. Tested with PyTorch 2.13."""

from __future__ import annotations

import base64
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, final

import ml_dtypes
import numpy as np

from replicax import _nest
from replicax._deprecation import frames_to_the_user
from replicax._typing import Json, Nest
from replicax.errors import InexactResumption
from replicax.input._ending import Guarded
from replicax.input._source import CountingReader, Reader, Source, fields_of


def recognise(dataset: object) -> Source | None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(dataset, data.DataLoader):
        return _LoaderSource(dataset)
    return None


@final
class _LoaderSource(Source):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def start(self, state: object = None) -> Reader:
        import torch

        # The random state before a pass determines the order of the pass.
        generator = self._generator()
        if state is None:
            origin = _to_text(generator.get_state())
            return CountingReader(self._begin(), _to_numpy, origin=origin)
        done, origin = fields_of(state, "read", "origin")
        self._warn_of_unknown_samplers()
        now = generator.get_state()
        generator.set_state(torch.from_numpy(_from_text(origin).copy()))
        elements = self._begin()
        if generator is torch.default_generator:
            # Samplers draw a seed from the default generator on first use, and then continue
            # independently. From a generator of their own they may draw later too.
            generator.set_state(now)
        return CountingReader(elements, _to_numpy, origin=origin, done=done)

    def _warn_of_unknown_samplers(self) -> None:
        data = sys.modules["torch.utils.data"]
        known = (
            data.BatchSampler,
            data.RandomSampler,
            data.SequentialSampler,
            data.SubsetRandomSampler,
            data.WeightedRandomSampler,
        )
        if isinstance(self._loader.dataset, data.IterableDataset):
            return
        for sampler in self._samplers():
            if type(sampler) not in known:
                warnings.warn(
                    f"The loader's {type(sampler).__name__} is not one of PyTorch's own, so that "
                    "replicax cannot know what it draws its order from. The pass resumes exactly "
                    "only if the sampler has the same order in every pass and process.",
                    InexactResumption,
                    stacklevel=frames_to_the_user(),
                )

    def _begin(self) -> Iterator[Any]:
        """Begin a pass, and read its first element now, because samplers draw on first use."""
        elements = Guarded(iter(self._loader))
        try:
            first = next(elements)
        except StopIteration:
            return iter(())
        return _after(first, elements)

    def _generator(self) -> Any:
        """Return the generator that the loader draws its order from."""
        import torch

        for owner in (*self._samplers(), self._loader):
            generator = getattr(owner, "generator", None)
            if generator is not None:
                return generator
        return torch.default_generator

    def _samplers(self) -> list[object]:
        """Return the samplers that set the order; a user's batch sampler usually contains one."""
        batches = self._loader.batch_sampler
        samplers = [self._loader.sampler, batches, getattr(batches, "sampler", None)]
        return [sampler for sampler in samplers if sampler is not None]

    @property
    def length(self) -> int | None:
        with contextlib.suppress(TypeError):  # an iterable dataset has none
            return len(self._loader)
        return None


def _after(first: object, rest: Iterator[object]) -> Iterator[object]:
    yield first
    del first
    yield from rest


def _to_numpy(element: object) -> Nest:
    return _nest.transform(_leaf_to_numpy, element, everything=True)


# `Any`, because type checkers do not know the attributes of a tensor without PyTorch.
def _leaf_to_numpy(leaf: Any) -> np.ndarray:
    import torch

    if not isinstance(leaf, torch.Tensor):
        return np.asarray(leaf)
    leaf = leaf.detach().cpu()
    if leaf.dtype == torch.bfloat16:  # NumPy knows it only through an extension.
        return leaf.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return leaf.numpy()


def _to_text(state: Json) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8)
