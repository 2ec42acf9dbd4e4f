"""Training steps as users of JAX write them, shared by the two sides of `jax_program.py`.

A kind takes `mean`, which averages gradients over the replicas and does nothing where XLA divides
the program, and the name of the replicas' axis where there is one. It makes the state and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

FEATURES = 784
HIDDEN = 512
CLASSES = 10
ROWS = 256
RATE = 0.001
MICROBATCHES = 4

Mean = Callable[[Any], Any]
Step = Callable[[Any, Any], tuple[Any, jax.Array]]  # (state, batch) -> (state, loss)
Kind = Callable[[Mean, str | None], tuple[Any, Step]]


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "y": random.integers(0, CLASSES, ROWS).astype(np.int32),
    }


def params_of(*sizes: int) -> list[dict[str, jax.Array]]:
    random = np.random.default_rng(1)
    return [
        {
            "w": jnp.asarray(random.normal(size=(rows, columns)) * 0.05, jnp.float32),
            "b": jnp.zeros(columns),
        }
        for rows, columns in pairwise(sizes)
    ]


def mlp_params() -> list[dict[str, jax.Array]]:
    return params_of(FEATURES, HIDDEN, HIDDEN, CLASSES)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


def loss_of(params: Any, batch: Any) -> jax.Array:
    return cross_entropy(mlp(params, batch["x"]), batch["y"])


def functional(
    mean: Mean, tx: Any, params: Any, loss_fn: Callable[[Any, Any], jax.Array] = loss_of
) -> tuple[Any, Step]:
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(mean(gradients), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


def dict_and_sgd(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, mean(gradients)), loss

    return mlp_params(), step


def dict_and_adam(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    return functional(mean, optax.adam(RATE), mlp_params())


def clipped_and_scheduled(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, 100, 10_000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return functional(mean, tx, mlp_params())


def multi_steps(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    tx = optax.MultiSteps(optax.adam(RATE), every_k_schedule=2)
    return functional(mean, tx, mlp_params())


def averaged_params(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    state, step = functional(mean, optax.adam(RATE), mlp_params())

    def averaging(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        (params, opt_state), average = state
        (params, opt_state), loss = step((params, opt_state), batch)
        average = optax.incremental_update(params, average, 0.01)
        return ((params, opt_state), average), loss

    return (state, mlp_params()), averaging


def equinox_module(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    model = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"])

    return functional(mean, optax.adam(RATE), params, loss_fn)


def linen_train_state(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    class Model(nn.Module):
        axis: str | None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = nn.Dense(HIDDEN, use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x))
            return nn.Dense(CLASSES)(x)

    class State(TrainState):
        batch_stats: Any

    variables = Model(None).init(jax.random.key(0), batch()["x"][:2])
    apply = Model(axis).apply
    state = State.create(apply_fn=apply, tx=optax.adam(RATE), **variables)
    state = state.replace(step=jnp.zeros((), jnp.int32))

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["y"]), changed["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=mean(gradients), batch_stats=statistics), loss

    return state, step


def bfloat16(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    params = jax.tree.map(lambda array: array.astype(jnp.bfloat16), mlp_params())

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(mlp(params, batch["x"].astype(jnp.bfloat16)), batch["y"])

    return functional(mean, optax.sgd(RATE), params, loss_fn)


def scan_over_layers(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    """Make a program that scans over layers, with `jax.checkpoint` around each."""
    first, *layers, last = params_of(FEATURES, *[HIDDEN] * 5, CLASSES)
    params = (first, jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers), last)

    @jax.checkpoint
    def apply(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return jax.nn.relu(x @ layer["w"] + layer["b"]), None

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        first, layers, last = params
        x, _ = jax.lax.scan(apply, mlp([first], batch["x"]), layers)
        return cross_entropy(mlp([last], x), batch["y"])

    return functional(mean, optax.adam(RATE), params, loss_fn)


def scan_over_microbatches(mean: Mean, axis: str | None) -> tuple[Any, Step]:
    params, tx = mlp_params(), optax.adam(RATE)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        # Every microbatch has rows of all devices: the second dimension is split.
        parts = jax.tree.map(
            lambda a: a.reshape(-1, MICROBATCHES, *a.shape[1:]).swapaxes(0, 1), batch
        )

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, parts)
        loss, gradients = jax.tree.map(lambda array: array / MICROBATCHES, total)
        updates, opt_state = tx.update(mean(gradients), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        dict_and_sgd,
        dict_and_adam,
        clipped_and_scheduled,
        multi_steps,
        averaged_params,
        equinox_module,
        linen_train_state,
        bfloat16,
        scan_over_layers,
        scan_over_microbatches,
    )
}
