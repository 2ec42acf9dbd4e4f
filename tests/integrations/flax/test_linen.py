"""A `TrainState` of Flax's older modules: a nest of arrays that goes in and out of each step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState
from flax_models import ROWS, TWO_AND_FOUR, X, Y, require_divided, shared
from support import equal

import replicax as rx

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0, 9)))


class Normalised(linen.Module):
    """Two dense layers, and the statistics of a batch if an axis or one device has all of it."""

    axis_name: str | None = None
    normalises: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(6, use_bias=not self.normalises)(x)
        if self.normalises:
            x = linen.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return linen.Dense(1)(linen.relu(x))


class State(TrainState):
    batch_stats: Any


def made(**options: Any) -> State:
    model = Normalised(**options)
    variables = model.init(jax.random.key(0), X[:1])
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=TX,
        batch_stats=variables.get("batch_stats", {}),
    )


def differentiated(state: State, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    def loss(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        predictions, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return ((predictions - y) ** 2).sum() / ROWS, new.get("batch_stats", {})

    return jax.grad(loss, has_aux=True)(state.params)


def plain_step(state: State, x: jax.Array, y: jax.Array) -> State:
    gradients, statistics = differentiated(state, x, y)
    return state.apply_gradients(grads=gradients, batch_stats=statistics)


def step_of_replicas(state: State, x: jax.Array, y: jax.Array) -> State:
    gradients, statistics = differentiated(state, x, y)
    gradients = rx.get_replica_context().all_reduce("SUM", gradients)
    return state.apply_gradients(grads=gradients, batch_stats=statistics)


def step_over_the_axis(state: State, x: jax.Array, y: jax.Array) -> State:
    gradients, statistics = differentiated(state, x, y)
    gradients = jax.tree.map(lambda x: jax.lax.psum(x, "replica"), gradients)
    return state.apply_gradients(grads=gradients, batch_stats=statistics)


@functools.cache
def on_one_device(normalises: bool) -> State:
    state, compiled = made(normalises=normalises), jax.jit(plain_step)
    for _ in range(3):
        state = compiled(state, X, Y)
    return state


def require_equal(strategy: rx.Strategy, state: State, expected: State) -> None:
    """Every replica has the state of one device."""
    for part in strategy.experimental_local_results(state):
        plain = part.replace(apply_fn=expected.apply_fn)
        jax.tree.map(lambda value, wanted: equal(value, wanted, 1e-5), plain, expected)


@pytest.fixture(params=TWO_AND_FOUR)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return TWO_AND_FOUR[request.param]()


@pytest.mark.parametrize("step", [step_of_replicas, step_over_the_axis])
def test_compiled_steps_equal_one_device_and_are_divided(strategy, step):
    state = made(axis_name="replica")

    @rx.function
    def train(state, x, y):
        return strategy.run(step, args=(state, x, y))

    for batch in shared(strategy, *[(X, Y)] * 3):
        state = train(state, *batch)
    require_equal(strategy, state, on_one_device(True))
    require_divided(strategy, train.lower(state, *batch).compile().as_text())
    statistics = on_one_device(True).batch_stats["BatchNorm_0"]["mean"]
    assert np.abs(statistics).min() > 0  # it has changed


def test_eager_steps_equal_one_device(two):
    state = made(normalises=False)
    for batch in shared(two, *[(X, Y)] * 3):
        state = two.run(step_of_replicas, args=(state, *batch))
    require_equal(two, state, on_one_device(False))
