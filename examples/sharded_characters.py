"""Train a character transformer whose state does not fit on one device.

    python examples/sharded_characters.py
    python examples/sharded_characters.py --limit 64 --mirrored

A limit on the memory of a device is stated, and both strategies are planned first. Under
`MirroredStrategy` each device has all weights and slots, which is over the limit. Under
`FullyShardedStrategy` each of the four devices has a quarter of them and gathers one layer at a
time; with this the model is trained to foresee the next character of the pages in docs/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

LAYERS, WIDTH, HEADS = 8, 128, 4
GLOBAL_BATCH, LENGTH = 16, 64
CHARACTERS = 256  # bytes of UTF-8


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


@jax.checkpoint  # The backward pass computes a layer again, and gathers its weights again.
def layer(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    joint, mixing, up, down = weights
    shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value = (
        part.reshape(shape) for part in jnp.split(normalized(x) @ joint, 3, axis=-1)
    )
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(x.shape) @ mixing
    return x + jax.nn.gelu(normalized(x) @ up) @ down, None


def program(strategy: rx.Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a training step, and the shape of its batches."""
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def weight(name: str, *shape: int) -> rx.Variable:
        key, scale = next(keys), shape[-2] ** -0.5
        return rx.Variable(lambda: scale * jax.random.normal(key, shape), name=name)

    with strategy.scope():
        stacks = [
            weight("joint", LAYERS, WIDTH, 3 * WIDTH),
            weight("mixing", LAYERS, WIDTH, WIDTH),
            weight("up", LAYERS, WIDTH, 4 * WIDTH),
            weight("down", LAYERS, 4 * WIDTH, WIDTH),
        ]
        embedding = weight("embedding", CHARACTERS, WIDTH)
        places = weight("places", LENGTH, WIDTH)
        output = weight("output", WIDTH, CHARACTERS)
        optimizer = rx.Optimizer(optax.adam(2e-3))
    variables = [*stacks, embedding, places, output]

    def replica_step(pieces: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            x = embedding.value[pieces[:, :-1]] + places.value
            x, _ = jax.lax.scan(layer, x, tuple(stack.value for stack in stacks))
            logits = normalized(x) @ output
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:])
            return losses.sum() / (GLOBAL_BATCH * LENGTH)

        return optimizer.minimize(loss, variables)

    @rx.function
    def step(pieces: rx.PerReplica) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(pieces,)), axis=None)

    return step, (jax.ShapeDtypeStruct((GLOBAL_BATCH, LENGTH + 1), jnp.int32),)


def batches(pages: Path, count: int) -> Iterator[np.ndarray]:
    """Yield pieces of the pages, one character longer than the model sees."""
    text = b"".join(page.read_bytes() for page in sorted(pages.glob("*.md")))
    codes, random = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(0)
    for _ in range(count):
        starts = random.integers(len(codes) - LENGTH - 1, size=GLOBAL_BATCH)
        yield codes[starts[:, None] + np.arange(LENGTH + 1)]


@click.command()
@click.option("--steps", default=300, show_default=True)
@click.option("--limit", default=16, show_default=True, help="MiB of a device for a step.")
@click.option("--mirrored", is_flag=True, help="Train with the whole state on each device.")
@click.option("--pages", type=Path, default=Path(__file__).parents[1] / "docs")
def main(steps: int, limit: int, mirrored: bool, pages: Path) -> None:
    """Plan both ways, then train."""
    needed = {
        name: rx.planning.plan(program, "cpu:4", placement=placement).memory.needed / 2**20
        for name, placement in [("mirrored", None), ("sharded", rx.parts.ShardedPlacement())]
    }
    for name, size in needed.items():
        print(f"{name}: {size:.1f} MiB per device, {'fits' if size <= limit else 'too much'}")
    name = "mirrored" if mirrored else "sharded"
    if needed[name] > limit:
        raise click.ClickException(f"The {name} step does not fit into {limit} MiB.")

    make = rx.MirroredStrategy if mirrored else rx.FullyShardedStrategy
    strategy = make([f"CPU:{index}" for index in range(4)])
    step, _ = program(strategy)
    losses = [
        step(pieces)
        for pieces in strategy.experimental_distribute_dataset(list(batches(pages, steps)))
    ]
    for number in range(0, steps, max(1, steps // 5)):
        print(f"step {number:4d}  loss {float(losses[number]):.3f}")
    print(f"Loss of the last ten steps: {np.mean([float(loss) for loss in losses[-10:]]):.3f}")
    print(strategy.extended.describe_variables())


if __name__ == "__main__":
    main()
