"""The models people know: their weights, their data, and their code, for all libraries.

A model is written once, over the operations that a library provides: every contestant computes
the same, by what its library has for each operation. Only NumPy is imported here, because each
contestant runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from _problem import CLASSES, Batch, ModelCell

SIDE = 28  # of an image
VOCABULARY = 256
LENGTH = 64
WIDTH = 128
HEADS = 4
LAYERS = 2
EPSILON = 1e-7  # of Adam, and the same everywhere: the defaults of the libraries differ
NORM_EPSILON = 1e-5
WRONG = 0.5  # so many labels are random, so that losses stay large enough to be compared


class Operations(Protocol):
    """What a library provides; activations have their channels last, but between `conv`s."""

    def conv(self, images: Any, filters: Any, bias: Any) -> Any:
        """Return the convolution without padding."""
        ...

    def relu(self, x: Any) -> Any: ...

    def gelu(self, x: Any) -> Any:
        """Return the approximation by `tanh`."""
        ...

    def pool(self, images: Any) -> Any:
        """Return the maximum of each 2 by 2 pixels."""
        ...

    def flatten(self, images: Any) -> Any: ...

    def dense(self, x: Any, kernel: Any, bias: Any) -> Any: ...

    def embed(self, table: Any, tokens: Any) -> Any: ...

    def norm(self, x: Any, scale: Any, shift: Any) -> Any:
        """Return the layer normalization."""
        ...

    def einsum(self, subscripts: str, *arrays: Any) -> Any: ...

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        """Return the causal attention; dimensions are rows, places, heads and channels."""
        ...

    def cross_entropy(self, logits: Any, labels: Any) -> Any:
        """Return the mean over all labels."""
        ...


Arrays = tuple[np.ndarray, np.ndarray]  # inputs and labels


@dataclass(frozen=True)
class Model:
    shapes: Mapping[str, tuple[int, ...]]
    logits: Callable[[Operations, Mapping[str, Any], Any], Any]
    examples: Callable[[np.random.RandomState, int], Arrays]

    def loss(
        self, operations: Operations, params: Mapping[str, Any], inputs: Any, labels: Any
    ) -> Any:
        return operations.cross_entropy(self.logits(operations, params, inputs), labels)


@dataclass(frozen=True)
class ModelProblem(Batch):
    params: Mapping[str, np.ndarray]


def model_problem_of(cell: ModelCell) -> ModelProblem:
    model, random = MODELS[cell.model], np.random.RandomState(0)
    params = {name: initial(random, name, shape) for name, shape in model.shapes.items()}
    rows, labels = (
        np.split(array, cell.replicas) for array in model.examples(random, cell.global_batch)
    )
    return ModelProblem(rows=rows, labels=labels, params=params)


def initial(random: np.random.RandomState, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) > 1:
        return normal(random, shape)
    return np.full(shape, 1.0 if name.endswith("scale") else 0.0, np.float32)


def normal(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return (random.randn(*shape) * 0.05).astype(np.float32)


def convnet(o: Operations, params: Mapping[str, Any], images: Any) -> Any:
    for layer in ("first", "second"):
        convolved = o.conv(images, params[f"{layer}_filters"], params[f"{layer}_bias"])
        images = o.pool(o.relu(convolved))
    return o.dense(o.flatten(images), params["head_kernel"], params["head_bias"])


def transformer(o: Operations, params: Mapping[str, Any], tokens: Any) -> Any:
    def norm(x: Any, name: str) -> Any:
        return o.norm(x, params[f"{name}_scale"], params[f"{name}_shift"])

    def dense(x: Any, name: str) -> Any:
        return o.dense(x, params[f"{name}_kernel"], params[f"{name}_bias"])

    x = o.embed(params["tokens"], tokens) + params["places"]
    for layer in range(LAYERS):
        projected = o.einsum("bld,dshk->sblhk", norm(x, f"before{layer}"), params[f"qkv{layer}"])
        attended = o.attend(projected[0], projected[1], projected[2])
        x = x + o.einsum("blhk,hkd->bld", attended, params[f"out{layer}"])
        x = x + dense(o.gelu(dense(norm(x, f"between{layer}"), f"up{layer}")), f"down{layer}")
    return dense(norm(x, "after"), "head")


def dense_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}_kernel": (inputs, outputs), f"{name}_bias": (outputs,)}


def norm_shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}_scale": (WIDTH,), f"{name}_shift": (WIDTH,)}


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    return {
        **norm_shapes(f"before{layer}"),
        f"qkv{layer}": (WIDTH, 3, HEADS, WIDTH // HEADS),
        f"out{layer}": (HEADS, WIDTH // HEADS, WIDTH),
        **norm_shapes(f"between{layer}"),
        **dense_shapes(f"up{layer}", WIDTH, 4 * WIDTH),
        **dense_shapes(f"down{layer}", 4 * WIDTH, WIDTH),
    }


def images_and_classes(random: np.random.RandomState, count: int) -> Arrays:
    """Return noisy copies of one image per class."""
    templates = random.randn(CLASSES, SIDE, SIDE, 1)
    classes = random.randint(0, CLASSES, count)
    images = templates[classes] + random.randn(count, SIDE, SIDE, 1)
    labels = np.where(random.rand(count) < WRONG, random.randint(0, CLASSES, count), classes)
    return images.astype(np.float32), labels.astype(np.int32)


def tokens_and_next(random: np.random.RandomState, count: int) -> Arrays:
    """Return sequences whose next token follows from the last one, unless it is random."""
    tokens = random.randint(0, VOCABULARY, (count, LENGTH + 1)).astype(np.int32)
    follows = random.rand(count, LENGTH) >= WRONG
    for place in range(LENGTH):
        after = (5 * tokens[:, place] + 1) % VOCABULARY
        tokens[:, place + 1] = np.where(follows[:, place], after, tokens[:, place + 1])
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


MODELS = {
    "convnet": Model(
        {
            "first_filters": (3, 3, 1, 32),
            "first_bias": (32,),
            "second_filters": (3, 3, 32, 64),
            "second_bias": (64,),
            **dense_shapes("head", 5 * 5 * 64, CLASSES),
        },
        convnet,
        images_and_classes,
    ),
    "transformer": Model(
        {
            "tokens": (VOCABULARY, WIDTH),
            "places": (LENGTH, WIDTH),
            **{
                name: shape
                for layer in range(LAYERS)
                for name, shape in layer_shapes(layer).items()
            },
            **norm_shapes("after"),
            **dense_shapes("head", WIDTH, VOCABULARY),
        },
        transformer,
        tokens_and_next,
    ),
}
