"""Plan the training of a transformer of 7 billion parameters on TPUs that are not there.

    replicax plan examples/seven_billion.py:program --topology v5e:16x16 --fully-sharded
    replicax plan examples/seven_billion.py:program --topology v5e:16x16

The first fits, and the second does not: without `--fully-sharded`, every chip has all weights and
slots. The layers are stacked, and a `lax.scan` goes through them: so XLA compiles one layer, which
takes a minute or two, and each is gathered when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicax as rx

LAYERS, WIDTH, INNER, HEADS = 32, 4096, 11_008, 32
VOCABULARY, LENGTH = 32_000, 2048


def normalized(x: jax.Array) -> jax.Array:
    size = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt(size + 1e-6)).astype(x.dtype)


@jax.checkpoint
def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    """Attention and a gated network, in bfloat16; the weights are in float32."""
    joint, mixing, gate, up, down = (weight.astype(x.dtype) for weight in weights)
    shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value = (
        part.reshape(shape) for part in jnp.split(normalized(x) @ joint, 3, axis=-1)
    )
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(x.shape) @ mixing
    middle = normalized(x)
    return x + (jax.nn.silu(middle @ gate) * (middle @ up)) @ down, None


def program(strategy: rx.Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    replicas = strategy.num_replicas_in_sync

    def weight(name: str, *shape: int) -> rx.Variable:
        return rx.Variable(lambda: jnp.zeros(shape), name=name)

    with strategy.scope():
        stacks = [
            weight("joint", LAYERS, WIDTH, 3 * WIDTH),
            weight("mixing", LAYERS, WIDTH, WIDTH),
            weight("gate", LAYERS, WIDTH, INNER),
            weight("up", LAYERS, WIDTH, INNER),
            weight("down", LAYERS, INNER, WIDTH),
        ]
        embedding = weight("embedding", VOCABULARY, WIDTH)
        output = weight("output", WIDTH, VOCABULARY)
        optimizer = rx.Optimizer(optax.adamw(1e-4))
    variables = [*stacks, embedding, output]

    def replica_step(tokens: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            x = jnp.take(embedding.value, tokens[:, :-1], axis=0).astype(jnp.bfloat16)
            x, _ = jax.lax.scan(layer, x, tuple(stack.value for stack in stacks))
            logits = (normalized(x) @ output.value.astype(x.dtype)).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean() / replicas

        return optimizer.minimize(loss, variables)

    @rx.function
    def step(tokens: rx.PerReplica) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(tokens,)), axis=None)

    return step, (jax.ShapeDtypeStruct((replicas, LENGTH + 1), jnp.int32),)
