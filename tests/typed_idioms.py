"""The idioms of the guide, as type checkers see them: for `test_typed_idioms.py`."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
x = jnp.ones((4, 3))

with strategy.scope():
    weights = rx.Variable(np.zeros((3, 1), np.float32), name="weights")
    bias = rx.Variable([0.0], dtype=jnp.float32, trainable=True)
    total = rx.Variable(lambda: jnp.zeros(()), synchronization="ON_READ", aggregation="sum")
    optimizer = rx.Optimizer(optax.sgd(0.1), reduction="mean")
    accumulating = rx.Optimizer(optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2))


# Variables and distributed values are accepted where arrays are.

assert_type(x @ weights + bias, jax.Array)
assert_type(weights * 2 - weights.value, jax.Array)
assert_type(2 * weights, jax.Array)
assert_type(-weights[0], jax.Array)
assert_type(weights > 0, jax.Array)
assert_type(jnp.sum(weights), jax.Array)
assert_type(jnp.where(weights > 0, weights, bias), jax.Array)
assert_type(jax.nn.relu(weights), jax.Array)
assert_type(float(total), float)
assert_type(weights.numpy().shape, tuple[Any, ...])
assert_type(weights.assign(jnp.zeros((3, 1))), rx.Variable)
assert_type(weights.assign_add(bias), rx.Variable)
assert_type(rx.PerReplica([x, x]) * rx.Mirrored([x, x]), jax.Array)
assert_type(rx.read(weights), jax.Array)
assert_type({weights: 1}[weights], int)


def shown(array: jax.Array) -> str:
    return str(array.shape)


assert_type(shown(weights), str)


# `rx.function` keeps the signature, as a decorator with and without arguments and as a method.


@rx.function
def scaled(x: jax.Array, factor: float = 1.0) -> jax.Array:
    return x * factor


@rx.function(reduce_retracing=True)
def shifted(x: jax.Array, *, by: int) -> tuple[jax.Array, int]:
    return x + by, by


class Model:
    weights = weights

    @rx.function
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weights

    @rx.function()
    def predict(self, x: jax.Array, temperature: float) -> dict[str, jax.Array]:
        return {"prediction": self(x) / temperature}


model = Model()
assert_type(scaled(x, factor=2.0), jax.Array)
assert_type(shifted(x, by=1), tuple[jax.Array, int])
assert_type(model(x), jax.Array)
assert_type(model.predict(x, temperature=1.0), dict[str, jax.Array])
assert_type(Model.predict(model, x, 1.0), dict[str, jax.Array])
assert_type(scaled.tracing_count, int)
scaled.lower(x).compile().as_text()
scaled(x, 2.0, 3.0)  # pyright: ignore[reportCallIssue]
scaled("x")  # pyright: ignore[reportArgumentType]
shifted(x, 1)  # pyright: ignore[reportCallIssue]
model.predict(x)  # pyright: ignore[reportCallIssue]


# Gradients have the structure of the variables, and functions keep their parameters.


def loss_fn(x: jax.Array, scale: float) -> jax.Array:
    return jnp.sum(x @ weights + bias) * scale


def loss_and_more() -> tuple[jax.Array, dict[str, int]]:
    return jnp.sum(weights), {"steps": 1}


one = rx.value_and_grad(loss_fn, weights)
assert_type(one(x, scale=2.0), tuple[jax.Array, jax.Array])
assert_type(rx.value_and_grad(loss_fn, [weights, bias])(x, 1.0)[1], list[jax.Array])
assert_type(rx.value_and_grad(loss_fn, {"w": weights})(x, 1.0)[1], dict[str, jax.Array])
assert_type(rx.value_and_grad(loss_fn, (weights, bias))(x, 1.0)[1], tuple[jax.Array, ...])
assert_type(
    rx.value_and_grad(loss_and_more, weights, has_aux=True)(),
    tuple[tuple[jax.Array, dict[str, int]], jax.Array],
)
assert_type(rx.grad(loss_fn, weights)(x, 1.0), jax.Array)
assert_type(rx.grad(loss_fn, [weights, bias])(x, 1.0), list[jax.Array])
assert_type(rx.grad(loss_and_more, weights, has_aux=True)(), tuple[jax.Array, dict[str, int]])
one("x", 1.0)  # pyright: ignore[reportArgumentType]


# A training step: what replicas return, and what becomes of it.


def replica_step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, int]:
    context = rx.get_replica_context()
    rows = rx.get_replica_context().all_reduce("SUM", float(len(y)))
    everything = context.all_gather(x, axis=0)
    loss, gradient = rx.value_and_grad(lambda: jnp.sum(everything @ weights) / rows, weights)()
    optimizer.apply_gradients([(gradient, weights)])
    optimizer.apply_gradients(zip([gradient], [weights], strict=True))
    total.assign_add(loss)

    def merge(strategy: rx.Strategy, value: jax.Array) -> jax.Array:
        return strategy.reduce("MEAN", value, axis=0)

    mean = rx.get_replica_context().merge_call(merge, args=(loss,))
    return mean, 1


replica = rx.get_replica_context()
if replica is None:
    raise RuntimeError("in cross-replica context")  # not taken for unreachable


def in_a_replica(context: rx.ReplicaContext) -> None:
    assert_type(context.all_reduce(rx.ReduceOp.SUM, x), jax.Array)
    assert_type(context.all_reduce("mean", {"a": x}), dict[str, jax.Array])
    assert_type(context.all_gather(weights, axis=0), jax.Array)
    assert_type(context.merge_call(lambda strategy: shown(x)), str)
    assert_type(context.strategy.num_replicas_in_sync, int)
    context.all_reduce("PRODUCT", x)  # pyright: ignore[reportCallIssue, reportArgumentType]


@rx.function
def train_step(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    losses, counts = strategy.run(replica_step, args=batch)
    assert_type(losses, jax.Array)
    assert_type(counts, int)
    return strategy.reduce("SUM", losses, axis=None)


features, labels = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
options = rx.InputOptions(auto_shard_policy="data", partial_batches="IN_ORDER")
assert_type(options.auto_shard_policy, rx.AutoShardPolicy)
dataset = strategy.experimental_distribute_dataset(
    rx.from_tensor_slices((features, labels)).batch(4), options
)
for batch in dataset:
    assert_type(train_step(batch), jax.Array)
iterator = iter(dataset)
assert_type(iterator, rx.DistributedIterator)
state = iterator.get_state()
train_step(next(iterator))

results = strategy.run(scaled, args=(strategy.split(features),))
assert_type(results, jax.Array)
assert_type(strategy.split(features), rx.PerReplica)
assert_type(strategy.split((features, labels)), tuple[rx.PerReplica, ...])
assert_type(strategy.split({"x": features}), dict[str, rx.PerReplica])
assert_type(strategy.experimental_local_results(results), tuple[jax.Array, ...])
assert_type(strategy.experimental_local_results(weights), tuple[rx.Variable, ...])
assert_type(strategy.gather(results, axis=0), jax.Array)
assert_type(strategy.reduce("mean", rx.PerReplica([x, x]), axis=None), jax.Array)
assert_type(strategy.reduce(rx.ReduceOp.MAX, (x, x), axis=0), tuple[jax.Array, jax.Array])
assert_type(rx.first(results), jax.Array)
assert_type(rx.first({"w": x}), dict[str, jax.Array])
values = strategy.experimental_distribute_values_from_function(
    lambda context: features[context.replica_id_in_sync_group]
)
assert_type(values, rx.PerReplica)
strategy.gradient_reduction = "mean"
strategy.reduce("AVERAGE", x, axis=None)  # pyright: ignore[reportCallIssue, reportArgumentType]
rx.Variable(0.0, synchronization="ON_REED")  # pyright: ignore[reportArgumentType]

with strategy.scope() as current:
    assert_type(current, rx.Strategy)
    strategy.extended.update(weights, lambda copy: copy.assign(x), args=())
