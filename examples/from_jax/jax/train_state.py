"""A `TrainState` of Flax linen with batch normalization, by `jax.jit` over a mesh."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
replicated = NamedSharding(mesh, PartitionSpec())
by_rows = NamedSharding(mesh, PartitionSpec("data"))

random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(nn.relu(x))


class State(TrainState):
    batch_stats: Any


def create():
    model = Model()
    return State.create(
        apply_fn=model.apply, tx=optax.adam(0.05), **model.init(jax.random.key(0), x, train=False)
    )


@jax.jit
def step(state, x, y):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        predicted, new = state.apply_fn(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((predicted - y) ** 2), new["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def train(steps=20):
    state = jax.device_put(create(), replicated)
    batch = jax.device_put((x, y), by_rows)
    loss = jnp.inf
    for _ in range(steps):
        state, loss = step(state, *batch)
    return (state.params, state.batch_stats), loss


if __name__ == "__main__":
    print("loss", train()[1])
