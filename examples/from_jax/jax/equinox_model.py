"""An Equinox module with dropout and batch normalization, on one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

random = np.random.default_rng(0)
x = random.normal(size=(64, 3)).astype(np.float32)
y = np.sin(x.sum(axis=1, keepdims=True))

tx = optax.adam(0.05)


class Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 8, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name="row", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jnp.tanh(x), key=key)), state


def loss_fn(model, state, x, y, keys):
    batched = jax.vmap(model, axis_name="row", in_axes=(0, None, 0), out_axes=(0, None))
    predicted, state = batched(x, state, keys)
    return jnp.mean((predicted - y) ** 2), state


@eqx.filter_jit
def step(model, state, opt_state, x, y, keys):
    derivative = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = derivative(model, state, x, y, keys)
    updates, opt_state = tx.update(grads, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, loss


def train(steps=20):
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    loss = jnp.inf
    for number in range(steps):
        keys = jax.random.split(jax.random.key(number), len(x))  # a key per row
        model, state, opt_state, loss = step(model, state, opt_state, x, y, keys)
    return eqx.filter(model, eqx.is_array), loss


if __name__ == "__main__":
    print("loss", train()[1])
