"""Small models of Flax NNX, and steps that train them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import STRATEGIES, mirrored

import replicax as rx

pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")
from flax import nnx

ROWS = 12  # divisible by one, two, three and four replicas
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 4)).astype(np.float32)
Y = _random.normal(size=(ROWS, 1)).astype(np.float32)


class Model(nnx.Module):
    """Two dense layers, and optionally batch normalization and dropout."""

    def __init__(self, *, norm: bool = False, axis_name: str | None = None, rate: float = 0.0):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(4, 6, use_bias=not norm, rngs=rngs)
        self.norm = nnx.BatchNorm(6, axis_name=axis_name, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.second(self.dropout(nnx.relu(x)))


def made(tx: Any = None, **options: Any) -> tuple[Model, nnx.Optimizer, nnx.MultiMetric]:
    model = Model(**options)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1) if tx is None else tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), spread=nnx.metrics.Welford())
    return model, optimizer, metrics


def loss_fn(model: Model, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    errors = (model(x) - y) ** 2
    return errors.sum() / ROWS, errors


def step(model: Model, optimizer: Any, metrics: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    (loss, errors), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    optimizer.update(model, gradients)
    metrics.update(values=errors)
    return loss


plain_step = nnx.jit(step)  # on one device
_differentiated = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))


def quick_step(model: Model, optimizer: Any, metrics: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Do the same, with most of it compiled: eagerly, each operation takes 30 ms per device."""
    (loss, errors), gradients = _differentiated(model, x, y)
    optimizer.update(model, gradients)
    metrics.update(values=errors)
    return loss


def numbers(*things: Any) -> dict[str, np.ndarray]:
    """Return the values of all variables, by path."""
    found = {}
    for index, thing in enumerate(things):
        for path, variable in nnx.iter_graph(thing):
            if isinstance(variable, nnx.Variable):
                value = variable.get_raw_value()
                if isinstance(variable, nnx.RngKey):
                    value = jax.random.key_data(value)
                found["/".join(map(str, (index, *path)))] = np.asarray(value)
    return found


def same(ours: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float = 1e-5) -> None:
    actual, wanted = numbers(*ours), numbers(*expected)
    assert list(actual) == list(wanted)
    for name, value in actual.items():
        assert value.dtype == wanted[name].dtype, name
        np.testing.assert_allclose(value, wanted[name], tolerance, tolerance, err_msg=name)


def shared(strategy: rx.Strategy, *batches: Any) -> list[Any]:
    """Return global batches, divided over the replicas."""
    by_rows = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    return list(strategy.experimental_distribute_dataset(list(batches), by_rows))


def require_divided(strategy: rx.Strategy, program: str) -> None:
    """Assert that every device of the strategy has a part of the rows of `X`, and none has all."""
    replicas = strategy.num_replicas_in_sync
    assert f"num_partitions={replicas}" in program.splitlines()[0]
    assert f"[{ROWS // replicas},4]" in program
    assert f"[{ROWS}," not in program


# Strategies of two and four replicas; among workers, theirs.
TWO_AND_FOUR = {name: STRATEGIES[name] for name in ("workers",) if name in STRATEGIES} or {
    f"mirrored {count}": mirrored(count) for count in (2, 4)
}


def over(*names: str) -> Any:
    """Return a mark that runs a test over some of the strategies; among workers, over theirs."""
    chosen = [name for name in names if name in STRATEGIES] or list(STRATEGIES)
    return pytest.mark.parametrize("strategy", chosen, indirect=True)
