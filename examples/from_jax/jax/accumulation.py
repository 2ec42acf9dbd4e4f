"""A loop over a dataset, with gradients accumulated over microbatches, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

random = np.random.default_rng(0)
x = random.normal(size=(640, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))
batches = [(x[start : start + 64], y[start : start + 64]) for start in range(0, 640, 64)]

tx = optax.adam(0.05)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


@jax.jit
def step(params, opt_state, x, y):
    def add(grads, microbatch):
        return jax.tree.map(jnp.add, grads, jax.grad(loss_fn)(params, *microbatch)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    microbatches = x.reshape(4, -1, 3), y.reshape(4, -1, 1)
    total, _ = jax.lax.scan(add, zeros, microbatches)
    grads = jax.tree.map(lambda g: g / 4, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train():
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (3, 8)),
        "w2": jax.random.normal(keys[1], (8, 1)),
    }
    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, *batch)
    return params, loss_fn(params, x, y)


if __name__ == "__main__":
    print("loss", train()[1])
