"""Checkpoints of Flax NNX modules, optimizers and random streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equal

import replicax as rx

nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed: pip install replicax[flax]")


class Network(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(4, 1, rngs=rngs)])

    def __call__(self, x):
        return self.rest[0](self.dropout(self.norm(self.first(x))))


X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def make(seed: int) -> rx.Checkpoint:
    model = Network(seed)
    return rx.Checkpoint(
        model=model, optimizer=nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    )


@nnx.jit
def train(model, optimizer):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(X) - 1.0) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def leaves(checkpoint: rx.Checkpoint) -> list[np.ndarray]:
    state = nnx.state((checkpoint.model, checkpoint.optimizer))
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def test_training_goes_on_exactly(tmp_path):
    checkpoint = make(0)
    for _ in range(2):
        train(checkpoint.model, checkpoint.optimizer)
    path = checkpoint.save(tmp_path / "model")
    before = leaves(checkpoint)
    losses = [float(train(checkpoint.model, checkpoint.optimizer)) for _ in range(3)]

    other = make(1)
    report = other.restore(path).assert_consumed()
    assert "model/rest/0/kernel" in report.restored
    for ours, theirs in zip(leaves(other), before, strict=True):
        equal(ours, theirs, 0)
    assert [float(train(other.model, other.optimizer)) for _ in range(3)] == losses


def test_variables_by_themselves_and_what_is_no_array(tmp_path):
    path = rx.Checkpoint(nest={"a": nnx.Param(jnp.ones(2))}).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(nest={"a": nnx.Param(jnp.zeros(2))})
    checkpoint.restore(path).assert_consumed()
    equal(checkpoint.nest["a"][...], [1.0, 1.0])
    with pytest.raises(rx.errors.InvalidType, match="its value is no array, but 'word'"):
        rx.Checkpoint(a=nnx.Variable("word"))


def test_a_restore_that_fails_halfway_changes_no_module(tmp_path, monkeypatch):
    checkpoint = rx.Checkpoint(model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)), weight=rx.Variable(1.0))
    path = checkpoint.save(tmp_path / "model")
    kernel = checkpoint.model.kernel
    changed = kernel.get_value() + 1.0
    kernel.set_value(changed)

    def fail(self, value):
        raise MemoryError

    monkeypatch.setattr(rx.Variable, "assign", fail)
    with pytest.raises(MemoryError):
        checkpoint.restore(path)
    assert kernel.get_value() is changed
    monkeypatch.undo()
    checkpoint.restore(path)
    equal(kernel.get_value(), changed - 1.0)
    assert not kernel.get_value().committed
