"""Training on what a dataset gives equals training on one device, whatever is left over at its end.

An epoch of `size` rows in batches of `replicas` rows or so: full batches, partial ones, ones that
leave replicas without rows, none at all.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import BY_ROWS
from support import equal

import replicax as rx

FEATURES = 3
RATE = 0.1


def data(size: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(size, FEATURES)).astype(np.float32)
    return x, (x @ [1.0, -2.0, 0.5] + 0.3).astype(np.float32)


def reference(size: int, batch: int, epochs: int) -> dict[str, np.ndarray]:
    """The same in NumPy, on whole batches."""
    x, y = data(size)
    weights, bias = np.zeros(FEATURES, np.float32), np.float32(0)
    losses, gradients, means = [], [], []
    error_sum = rows = 0.0
    for _ in range(epochs):
        for start in range(0, size, batch):
            xs, ys = x[start : start + batch], y[start : start + batch]
            error = xs @ weights + bias - ys
            losses.append(np.sum(error**2) / len(xs))
            gradient = 2 * xs.T @ error / len(xs)
            gradients.append(gradient)
            means.append(xs.mean(0))
            error_sum += np.abs(error).sum()
            rows += len(xs)
            weights = weights - RATE * gradient
            bias = bias - RATE * 2 * error.mean()
    return {
        "losses": np.array(losses),
        "gradients": np.array(gradients).reshape(-1, FEATURES),
        "means": np.array(means).reshape(-1, FEATURES),
        "metric": np.array([error_sum, rows]),
        "weights": weights,
        "bias": bias,
    }


def train(
    strategy: rx.Strategy, size: int, batch: int, epochs: int, way: str, rule: str = "even"
) -> dict[str, object]:
    source = rx.from_tensor_slices(data(size)).batch(batch)
    options = dataclasses.replace(BY_ROWS, partial_batches=rule)
    dataset = strategy.experimental_distribute_dataset(source, options)
    with strategy.scope():
        weights = rx.Variable(np.zeros(FEATURES, np.float32))
        bias = rx.Variable(np.float32(0))
        optimizer = rx.Optimizer(optax.sgd(RATE))
        metric = rx.Variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM")
    variables = [weights, bias]

    def replica_step(x, y, count):
        def loss_fn():
            error = x @ weights + bias - y
            return jnp.sum(error**2) / count, error

        (loss, error), gradients = rx.value_and_grad(loss_fn, variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        metric.assign_add(jnp.stack([jnp.sum(jnp.abs(error)), jnp.float32(x.shape[0])]))
        return loss, gradients[0]

    def step(element):
        x, y = element
        rows = strategy.run(lambda y: jnp.float32(y.shape[0]), args=(y,))
        count = strategy.reduce("SUM", rows, axis=None)
        loss, gradient = strategy.run(replica_step, args=(x, y, count))
        return (
            strategy.reduce("SUM", loss, axis=None),
            strategy.reduce("SUM", gradient, axis=None),
            strategy.reduce("MEAN", x, axis=0),
        )

    results = []
    next_step = rx.function(lambda iterator: step(next(iterator)))
    compiled_step = rx.function(step)
    for _ in range(epochs):
        iterator = iter(dataset)
        if way == "next":
            while True:
                try:
                    results.append(next_step(iterator))
                except StopIteration:
                    break
        else:
            results += [(step if way == "eager" else compiled_step)(x) for x in iterator]
    losses, gradients, means = zip(*results, strict=True) if results else ([], [], [])
    return {
        "losses": np.array(losses),
        "gradients": np.array(gradients).reshape(-1, FEATURES),
        "means": np.array(means).reshape(-1, FEATURES),
        "metric": metric.numpy(),
        "weights": weights.numpy(),
        "bias": bias.numpy(),
    }


@pytest.mark.parametrize("way", ["eager", "compiled", "next"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_an_epoch_of_any_size_equals_one_device(replicas, way):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    for size in range(2 * replicas + 2):
        expected = reference(size, replicas, epochs=2)
        actual = train(strategy, size, replicas, 2, way)
        for name, value in expected.items():
            assert not np.isnan(np.asarray(actual[name])).any(), f"{name} with {size} rows"
            equal(actual[name], value, 2e-5)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(("batch", "rule"), [(4, "even"), (5, "even"), (4, "in_order")])
def test_every_strategy_trains_on_a_partial_batch(strategy, batch, way, rule):
    expected = reference(11, batch, epochs=1)
    actual = train(strategy, 11, batch, 1, way, rule)
    for name, value in expected.items():
        equal(actual[name], value, 2e-5)


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
@pytest.mark.parametrize("size", range(1, 10))
def test_reducing_over_the_batch_has_the_right_denominator(op, size):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    rows = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2)
    function = {"MEAN": np.mean, "SUM": np.sum}[op]
    dataset = strategy.experimental_distribute_dataset(rx.from_tensor_slices(rows).batch(4))
    for number, element in enumerate(dataset):
        batch = rows[4 * number : 4 * number + 4]
        equal(strategy.reduce(op, element, axis=0), function(batch, axis=0))
        equal(strategy.reduce(op, element, axis=(0, 1)), function(batch))
        equal(strategy.gather(element, axis=0), batch)


def test_gradients_of_a_replica_without_rows_are_zero(two):
    with two.scope():
        weight = rx.Variable(2.0)
    (element,) = two.experimental_distribute_dataset([np.ones(1, np.float32)], None)
    gradient = two.run(
        lambda x: rx.grad(lambda: jnp.sum(weight * x), [weight])()[0], args=(element,)
    )
    assert [float(g) for g in two.experimental_local_results(gradient)] == [1, 0]
    assert isinstance(jax.tree.leaves(gradient)[0], rx.PerReplica)
