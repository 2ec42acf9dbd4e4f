"""The operations of the models in PyTorch, where the channels of images come first."""

from __future__ import annotations

import numpy as np
import torch
from _models import NORM_EPSILON
from torch.nn import functional

einsum = torch.einsum
relu = functional.relu


def inputs_of(rows: np.ndarray) -> torch.Tensor:
    """Convert images or tokens."""
    array = torch.from_numpy(rows)
    return array.permute(0, 3, 1, 2).contiguous() if array.ndim == 4 else array


def parameter_of(name: str, array: np.ndarray) -> torch.Tensor:
    filters = name.endswith("filters")
    return torch.from_numpy(array.transpose(3, 2, 0, 1).copy() if filters else array)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def conv(images: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(images, filters, bias)


def pool(images: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(images, 2)


def flatten(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 2, 3, 1).flatten(1)


def dense(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ kernel + bias


def embed(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.embedding(tokens, table)


def norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, scale.shape, scale, shift, NORM_EPSILON)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads_first = (array.transpose(1, 2) for array in (query, key, value))
    attended = functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return attended.transpose(1, 2)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
