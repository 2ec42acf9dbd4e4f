"""The operations of the models in JAX, for replicax and for JAX by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from _models import NORM_EPSILON

einsum = jnp.einsum
gelu = jax.nn.gelu
relu = jax.nn.relu


def conv(images: jax.Array, filters: jax.Array, bias: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return bias + jax.lax.conv_general_dilated(
        images, filters, (1, 1), "VALID", dimension_numbers=layout
    )


def pool(images: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, window, window, "VALID")


def flatten(images: jax.Array) -> jax.Array:
    return images.reshape(len(images), -1)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ kernel + bias


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=NORM_EPSILON) * scale + shift


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
