"""Trains a small transformer of Flax NNX to write, a character at a time, on several devices.

    pip install 'replicax[flax]'
    python examples/flax_characters.py --replicas 2

It reads the pages in docs/ and is asked how well it foresees pages that it has not read, next to
somebody who only counts characters, or pairs of them. Then it writes a few lines of its own: mostly
words, and no sense. 800 steps take some minutes on two cores.

The step closes over the model, the optimizer and the metric; `rx.function` finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

GLOBAL_BATCH = 32
LENGTH = 64  # characters that the model sees
HEADS = 4


class Block(nnx.Module):
    """Attention to what came before, then a dense layer for each character."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.dense1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.dense2 = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.05, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.dense2(nnx.gelu(self.dense1(self.norm2(x)))))


class Writer(nnx.Module):
    """Says for each character of a text how likely each next one is."""

    def __init__(self, alphabet: int, width: int, blocks: int, *, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(alphabet, width, rngs=rngs)
        self.places = nnx.Embed(LENGTH, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.output = nnx.Linear(width, alphabet, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(text)
        x = self.characters(text) + self.places(jnp.arange(text.shape[-1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.output(self.norm(x))


def read(pages: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the alphabet, the text to learn from, and that of every eighth page."""
    texts = [page.read_text() for page in sorted(pages.glob("*.md"))]
    alphabet = sorted(set("".join(texts)))
    codes = {character: code for code, character in enumerate(alphabet)}
    known, unseen = (
        np.array([codes[character] for text in part for character in text], np.int32)
        for part in ([t for i, t in enumerate(texts) if i % 8], texts[::8])
    )
    return alphabet, known, unseen


def by_counting(known: np.ndarray, unseen: np.ndarray, alphabet: int) -> tuple[float, float]:
    """Return the loss on `unseen` that counts of characters and pairs in `known` give."""
    pairs = np.full((alphabet, alphabet), 0.1)
    np.add.at(pairs, (known[:-1], known[1:]), 1)
    single = pairs.sum(0) / pairs.sum()
    after = pairs / pairs.sum(1, keepdims=True)
    following = after[unseen[:-1], unseen[1:]]
    return float(-np.log(single[unseen[1:]]).mean()), float(-np.log(following).mean())


def windows(text: np.ndarray, count: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of pieces of a text, one character longer than the model sees."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        starts = random.integers(len(text) - LENGTH - 1, size=GLOBAL_BATCH)
        yield text[starts[:, None] + np.arange(LENGTH + 1)]


@nnx.jit
def write(model: Writer, start: jax.Array, keys: jax.Array) -> jax.Array:
    """Goes on with a text of LENGTH characters, one for each key."""

    def one_more(text: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jax.random.categorical(key, model(text[None])[0, -1] / 0.7)
        return jnp.append(text[1:], new.astype(text.dtype)), new

    return jax.lax.scan(one_more, start, keys)[1]


@click.command()
@click.option("--replicas", default=2, show_default=True)
@click.option("--steps", default=800, show_default=True)
@click.option("--width", default=128, show_default=True)
@click.option("--blocks", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--pages", type=Path, default=Path(__file__).parents[1] / "docs")
def main(replicas: int, steps: int, width: int, blocks: int, seed: int, pages: Path) -> None:
    """Trains, is tested, writes."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    alphabet, known, unseen = read(pages)
    with strategy.scope():
        model = Writer(len(alphabet), width, blocks, rngs=nnx.Rngs(seed))
        schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 2), steps)
        transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
        loss = nnx.metrics.Average()

    def losses_of(model: Writer, pieces: jax.Array) -> jax.Array:
        logits = model(pieces[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:])

    def replica_step(pieces: jax.Array) -> None:
        def loss_fn(model: Writer) -> tuple[jax.Array, jax.Array]:
            losses = losses_of(model, pieces)
            return losses.sum() / (GLOBAL_BATCH * LENGTH), losses

        (_, losses), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        loss.update(values=losses)

    @rx.function
    def train_step(pieces: rx.PerReplica) -> None:
        strategy.run(replica_step, args=(pieces,))

    @rx.function
    def test_step(pieces: rx.PerReplica) -> None:
        strategy.run(lambda p: loss.update(values=losses_of(model, p)), args=(pieces,))

    def result() -> float:
        value = float(loss.compute())
        loss.reset()
        return value

    training = strategy.experimental_distribute_dataset(list(windows(known, steps, seed)))
    for step, pieces in enumerate(training, start=1):
        train_step(pieces)
        if step % max(1, steps // 10) == 0:
            print(f"step {step:4d}  loss {result():.3f}")

    model.eval()
    loss.reset()
    for pieces in strategy.experimental_distribute_dataset(list(windows(unseen, 20, seed))):
        test_step(pieces)
    single, pairs = by_counting(known, unseen, len(alphabet))
    print(f"Loss on unseen pages: {result():.3f}")
    print(f"By counting characters: {single:.3f}, pairs: {pairs:.3f}")
    keys = jax.random.split(jax.random.key(seed), 400)
    written = write(model, jnp.asarray(unseen[:LENGTH]), keys)
    print("".join(alphabet[code] for code in np.asarray(written)))


if __name__ == "__main__":
    main()
