"""The common ground of the ports and their TensorFlow twins: data and initial weights.

It needs NumPy and scikit-learn alone, so that both sides can import it. The rows are shuffled once,
here: each library shuffles in an order of its own, and losses can be compared only over the same
batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from sklearn.datasets import load_digits
from sklearn.utils import Bunch

Rows = tuple[np.ndarray, np.ndarray]

LEARN = 1437  # of 1,797; the rest is for testing


def digits() -> tuple[Rows, Rows]:
    """Return images of 8 by 8 pixels and their labels: those to learn from, those to test with."""
    data = cast(Bunch, load_digits())
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, None] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return (images[:LEARN], labels[:LEARN]), (images[LEARN:], labels[LEARN:])


def initial_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return a kernel (He's normal) and a bias (zeros) per layer, for the shapes of the kernels."""
    random = np.random.default_rng(1)
    weights = {}
    for layer, shape in shapes.items():
        scale = math.sqrt(2 / math.prod(shape[:-1]))
        weights[f"{layer}_kernel"] = (scale * random.normal(size=shape)).astype(np.float32)
        weights[f"{layer}_bias"] = np.zeros(shape[-1], np.float32)
    return weights


def record(path: str | Path, made_by: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Write curves as JSON, one per line, with as many digits as float32 has."""
    rounded = {name: [float(f"{value:.8g}") for value in curve] for name, curve in curves.items()}
    entries = {"made_by": made_by, **rounded}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
