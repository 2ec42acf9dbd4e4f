"""The cost of a step in a kind of program of JAX users, by replicax and by its mesh form.

Both run in one process, on one mesh of two devices, from the same state. Run as
`jax_program.py '{"kind": "dict_and_adam", "rounds": 5, "steps": 10, "compiles": 3}'`, it prints one
line of JSON; `benchmarks/jax_programs.py` asks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import equinox
import flax
import jax
import numpy as np
import optax
from _jax_kinds import (
    CLASSES,
    FEATURES,
    HIDDEN,
    KINDS,
    RATE,
    Kind,
    batch,
    cross_entropy,
    functional,
    loss_of,
    mlp_params,
)
from _protocol import with_python
from _replicax import VERSIONS, mirrored_strategy
from flax import nnx

import replicax as rx

REPLICAS = 2
# These kinds have state of their own, and their two sides are written differently.
VARIABLES, NNX = "variables_and_optimizer", "nnx_module"
WARMUP_STEPS = 3
TOLERANCE = 1e-3  # relative, for losses; 16-bit parameters are rounded per replica

Call = Callable[[], Any]  # a step, which returns the loss


def mesh_form(strategy: rx.Strategy, name: str) -> Call:
    """Make a `jax.jit` of the step on the whole batch, whose rows are divided over the devices."""
    topology = strategy.topology
    if name == NNX:
        return _nnx_mesh_form(topology)
    if name == VARIABLES:
        state, step = functional(lambda nest: nest, optax.adam(RATE), mlp_params())
        jitted = jax.jit(step, donate_argnums=0)  # as variables are
    else:
        state, step = KINDS[name](lambda nest: nest, None)
        jitted = jax.jit(step)
    held = [jax.device_put(state, topology.replicated)]
    rows = jax.device_put(batch(), topology.split)

    def call() -> Any:
        held[0], loss = jitted(held[0], rows)
        return loss

    return call


def replicax_form(strategy: rx.Strategy, name: str) -> Call:
    """Make a `strategy.run` of the step on each replica's rows."""
    rows = strategy.split(batch())
    if name == VARIABLES:
        return _with_variables(strategy, rows)
    if name == NNX:
        return _nnx_replicax_form(strategy, rows)
    return _functional(strategy, KINDS[name], rows)


def _functional(strategy: rx.Strategy, kind: Kind, rows: Any) -> Call:
    def mean(nest: Any) -> Any:
        context = rx.get_replica_context()
        assert context is not None
        return context.all_reduce("MEAN", nest)

    state, step = kind(mean, "replica")

    @rx.function
    def train_step(state: Any, rows: Any) -> Any:
        state, loss = strategy.run(step, args=(state, rows))
        return state, strategy.reduce("MEAN", loss, axis=None)

    held = [jax.device_put(state, strategy.topology.replicated)]

    def call() -> Any:
        held[0], loss = train_step(held[0], rows)
        return loss

    return call


def _with_variables(strategy: rx.Strategy, rows: Any) -> Call:
    with strategy.scope():
        params = rx.make_variables(mlp_params())
        optimizer = rx.Optimizer(optax.adam(RATE), reduction="MEAN")

    def step(rows: Any) -> Any:
        loss, gradients = rx.value_and_grad(lambda: loss_of(params, rows), params)()
        optimizer.apply_gradients(gradients, params)
        return loss

    @rx.function
    def train_step(rows: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(step, args=(rows,)), axis=None)

    return lambda: train_step(rows)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = (FEATURES, HIDDEN, HIDDEN, CLASSES)
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        *layers, last = self.layers
        for layer in layers:
            x = jax.nn.relu(layer(x))
        return last(x)


def _nnx_objects() -> tuple[Mlp, nnx.Optimizer]:
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)


def _nnx_step(model: Mlp, optimizer: nnx.Optimizer, rows: Any) -> jax.Array:
    def loss_fn(model: Mlp) -> jax.Array:
        return cross_entropy(model(rows["x"]), rows["y"])

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def _nnx_mesh_form(topology: Any) -> Call:
    objects = _nnx_objects()
    for each in objects:
        nnx.update(each, jax.device_put(nnx.state(each), topology.replicated))
    rows = jax.device_put(batch(), topology.split)
    jitted = nnx.jit(_nnx_step)
    return lambda: jitted(*objects, rows)


def _nnx_replicax_form(strategy: rx.Strategy, rows: Any) -> Call:
    strategy.gradient_reduction = "MEAN"
    with strategy.scope():
        objects = _nnx_objects()

    @rx.function
    def train_step(rows: Any) -> Any:
        losses = strategy.run(_nnx_step, args=(*objects, rows))
        return strategy.reduce("MEAN", losses, axis=None)

    return lambda: train_step(rows)


def measure_first(*, kind: str, first: str) -> dict[str, object]:
    """Measure the seconds of the first step in this process, by one of the forms."""
    form = {"replicax": replicax_form, "mesh": mesh_form}[first]
    return {"first": _seconds(form(mirrored_strategy(REPLICAS), kind))}


def measure(*, kind: str, rounds: int, steps: int, compiles: int) -> dict[str, object]:
    """Measure the seconds of steps that compile, and of the median later step of each round."""
    strategy = mirrored_strategy(REPLICAS)
    forms = {"replicax": replicax_form, "mesh": mesh_form}
    for form in forms.values():  # neither pays for the very first compilation
        _seconds(form(strategy, "dict_and_sgd"))
    compiling: list[list[float]] = []
    calls: list[Call] = []
    for _ in range(compiles):
        calls = [form(strategy, kind) for form in forms.values()]
        compiling.append([_seconds(call) for call in calls])
    take_turns(calls, WARMUP_STEPS)
    later = [
        [median(seconds) for seconds in zip(*take_turns(calls, steps), strict=True)]
        for _ in range(rounds)
    ]
    losses = [float(call()) for call in calls]
    if not np.isclose(*losses, rtol=TOLERANCE):
        raise AssertionError(
            f"The losses of {kind} are {losses} after as many steps: these are two trainings, "
            "whose times cannot be compared."
        )
    return {
        "compiling": dict(zip(forms, zip(*compiling, strict=True), strict=True)),
        "later": dict(zip(forms, zip(*later, strict=True), strict=True)),
        "losses": losses,
        "versions": with_python(
            VERSIONS | {each.__name__: each.__version__ for each in (optax, flax, equinox)}
        ),
    }


def take_turns(calls: Sequence[Call], steps: int) -> list[list[float]]:
    """Return a row per turn: the seconds of one step of each call."""
    return [[_seconds(call) for call in calls] for _ in range(steps)]


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    print(json.dumps((measure_first if "first" in question else measure)(**question)))
