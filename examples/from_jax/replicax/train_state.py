"""A `TrainState` of Flax linen with batch normalization, on two replicas."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import replicax as rx

strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name="replica")(x)
        return nn.Dense(1)(nn.relu(x))


class State(TrainState):
    batch_stats: Any


def create():
    model = Model()
    return State.create(
        apply_fn=model.apply, tx=optax.adam(0.05), **model.init(jax.random.key(0), x, train=False)
    )


@rx.function
def step(state, x, y):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        predicted, new = state.apply_fn(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((predicted - y) ** 2), new["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    loss, grads = rx.get_replica_context().all_reduce("MEAN", (loss, grads))
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def train(steps=20):
    state = create()
    batch = strategy.split((x, y))
    loss = jnp.inf
    for _ in range(steps):
        state, loss = strategy.run(step, args=(state, *batch))
    return rx.first(((state.params, state.batch_stats), loss))


if __name__ == "__main__":
    print("loss", train()[1])
