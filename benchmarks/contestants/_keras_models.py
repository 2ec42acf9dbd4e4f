"""The models people know in Keras' layers, as users of `fit` write them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from _models import CLASSES, HEADS, LAYERS, LENGTH, NORM_EPSILON, SIDE, VOCABULARY, WIDTH, normal
from keras import layers


def known_model_of(name: str) -> keras.Model:
    """Make a model, with the same weights for all backends."""
    model = {"convnet": convnet, "transformer": transformer}[name]()
    random = np.random.RandomState(0)
    # Biases, and scales of normalizations, begin with the same constants everywhere.
    model.set_weights(
        [normal(random, each.shape) if each.ndim > 1 else each for each in model.get_weights()]
    )
    return model


def convnet() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def transformer() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Places()(layers.Embedding(VOCABULARY, WIDTH)(tokens))
    for _ in range(LAYERS):
        normed = layers.LayerNormalization(epsilon=NORM_EPSILON)(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False)
        x = x + attention(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization(epsilon=NORM_EPSILON)(x)
        wide = layers.Dense(4 * WIDTH, activation=keras.activations.gelu)(normed)
        x = x + layers.Dense(WIDTH)(wide)
    x = layers.LayerNormalization(epsilon=NORM_EPSILON)(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(x))


class Places(layers.Layer):
    """A layer that adds a learned vector for each place in the sequence."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=shape[1:], name="places")

    def call(self, x: Any) -> Any:
        return x + self.table
