"""A dictionary of arrays and SGD by hand, on two replicas."""

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)


def replica_step(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss, grads = jax.lax.pmean((loss, grads), "replica")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@rx.function
def step(params, x, y):
    return strategy.run(replica_step, args=(params, *strategy.split((x, y))))


def train(steps=20):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (3, 8)),
        "b1": jnp.zeros(8),
        "w2": jax.random.normal(keys[1], (8, 1)),
        "b2": jnp.zeros(1),
    }
    loss = jnp.inf
    for _ in range(steps):
        params, loss = step(params, x, y)
    return rx.first((params, loss))


if __name__ == "__main__":
    print("loss", train()[1])
