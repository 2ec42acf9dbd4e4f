"""A loop over a dataset, with gradients accumulated over microbatches, on two replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

random = np.random.default_rng(0)
x = random.normal(size=(640, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))
dataset = strategy.experimental_distribute_dataset(rx.from_tensor_slices((x, y)).batch(64))

tx = optax.adam(0.05)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


@rx.function
def step(variables, optimizer, x, y):
    params = rx.read(variables)

    def add(grads, microbatch):
        return jax.tree.map(jnp.add, grads, jax.grad(loss_fn)(params, *microbatch)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    microbatches = x.reshape(4, -1, 3), y.reshape(4, -1, 1)
    total, _ = jax.lax.scan(add, zeros, microbatches)
    grads = jax.tree.map(lambda g: g / 4, total)
    optimizer.apply_gradients(grads, variables)


def train():
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (3, 8)),
        "w2": jax.random.normal(keys[1], (8, 1)),
    }
    with strategy.scope():
        variables = rx.make_variables(params)
        optimizer = rx.Optimizer(tx, reduction="MEAN")
    for batch in dataset:
        strategy.run(step, args=(variables, optimizer, *batch))
    params = rx.read(variables)
    return params, loss_fn(params, x, y)


if __name__ == "__main__":
    print("loss", train()[1])
