"""Optax with its state beside the parameters, by `jax.jit` over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
replicated = NamedSharding(mesh, PartitionSpec())
by_rows = NamedSharding(mesh, PartitionSpec("data"))

random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))

tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, 50)),
)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(steps=20):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (3, 8)),
        "w2": jax.random.normal(keys[1], (8, 1)),
    }
    params, opt_state = jax.device_put((params, tx.init(params)), replicated)
    batch = jax.device_put((x, y), by_rows)
    loss = jnp.inf
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, *batch)
    return params, loss


if __name__ == "__main__":
    print("loss", train()[1])
