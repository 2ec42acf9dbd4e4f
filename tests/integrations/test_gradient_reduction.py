"""SUM, MEAN or NONE: what the gradients of the replicas become, for every kind of optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_models import nnx
from keras_models import keras
from support import equal, shares

import replicax as rx
from replicax import _once
from replicax.errors import ContextError, InvalidArgument, SummedTwice
from replicax.execution._row_weights import row_weights

RATE = 0.1
RANDOM = np.random.default_rng(0)
BATCHES = [RANDOM.normal(size=(rows, 3)).astype(np.float32) for rows in (6, 5, 6, 1)]
START = np.float32([[0.5], [-1.0], [2.0]])
MEAN_ERROR = 1e-5


def loss_of(weight: Any, x: Any) -> Any:
    return jnp.mean((x @ weight - 1.0) ** 2)


def on_one_device(batches: Any = BATCHES, factor: float = 1.0) -> np.ndarray:
    """The weight after these batches, each as a whole; `factor` is that of the gradients."""
    weight = START.astype(np.float64)
    for x in batches:
        weight = weight - RATE * factor * 2 * x.T @ (x @ weight - 1.0) / len(x)
    return weight


Change = Callable[[Any], Any]  # what a step does to its gradients before it applies them


def by_optimizer(change: Change, **arguments: Any) -> tuple[Callable, Callable]:
    weight = rx.Variable(START)
    optimizer = rx.Optimizer(optax.sgd(RATE), **arguments)

    def step(x: Any) -> None:
        gradients = rx.grad(lambda: loss_of(weight, x), [weight])()
        optimizer.apply_gradients(zip(change(gradients), [weight], strict=True))

    return step, weight.numpy


def by_keras(change: Change) -> tuple[Callable, Callable]:
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    model.build((None, 3))
    model.layers[0].kernel.assign(START)
    optimizer = keras.optimizers.SGD(RATE)
    variables = model.trainable_variables

    def step(x: Any) -> None:
        gradients = rx.grad(lambda: jnp.mean((model(x) - 1.0) ** 2), variables)()
        optimizer.apply_gradients(zip(change(gradients), variables, strict=True))

    return step, lambda: np.asarray(variables[0].value)


def by_nnx(change: Change) -> tuple[Callable, Callable]:
    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(START)
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

    def step(x: Any) -> None:
        gradients = nnx.grad(lambda model: jnp.mean((model(x) - 1.0) ** 2))(model)
        optimizer.update(model, change(gradients))

    return step, lambda: np.asarray(model.kernel[...])


WAYS = {"rx": by_optimizer, "keras": by_keras, "nnx": by_nnx}


def as_it_is(gradients: Any) -> Any:
    return gradients


def trained(
    strategy: rx.Strategy,
    way: Callable,
    compiled: bool,
    change: Change = as_it_is,
    **arguments: Any,
) -> np.ndarray:
    with strategy.scope():
        step, weight = way(change, **arguments)
    step = rx.function(step) if compiled else step
    for x in BATCHES:
        strategy.run(step, args=(shares(strategy, x),))
    return weight()


@pytest.fixture
def three() -> rx.Strategy:
    return rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_of_means_equals_one_device(way, compiled, three):
    three.gradient_reduction = "mean"

    assert [len(x) % 3 for x in BATCHES] == [0, 2, 0, 1]  # uneven shares, and empty ones
    equal(trained(three, WAYS[way], compiled), on_one_device(), MEAN_ERROR)


def test_an_optimizer_has_a_reduction_of_its_own(three):
    actual = trained(three, by_optimizer, compiled=False, reduction="MEAN")
    equal(actual, on_one_device(), MEAN_ERROR)
    with three.scope():
        assert (
            rx.Optimizer(optax.sgd(RATE), reduction="none").reduction is rx.GradientReduction.NONE
        )
        assert rx.Optimizer(optax.sgd(RATE)).reduction is None
        with pytest.raises(InvalidArgument, match="SUM, MEAN, NONE"):
            rx.Optimizer(optax.sgd(RATE), reduction="average")


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("way", WAYS)
def test_a_change_of_the_reduction_holds_from_the_next_step_on(way, two):
    with two.scope():
        step, weight = WAYS[way](as_it_is)
    x = BATCHES[0]
    expected = START.astype(np.float64)
    for reduction, factor in (("SUM", 2.0), ("MEAN", 1.0), ("SUM", 2.0)):
        two.gradient_reduction = reduction
        two.run(step, args=(shares(two, x),))
        expected = expected - RATE * factor * 2 * x.T @ (x @ expected - 1.0) / len(x)
        equal(weight(), expected, MEAN_ERROR)


def test_a_function_that_runs_a_strategy_is_traced_again(two):
    with two.scope():
        weight, optimizer = rx.Variable(0.0), rx.Optimizer(optax.sgd(1.0))

    @rx.function
    def train() -> None:
        two.run(lambda: optimizer.apply_gradients([(jnp.float32(-1), weight)]))

    for reduction, total in (("SUM", 2), ("MEAN", 3), ("SUM", 5), ("NONE", 6)):
        two.gradient_reduction = reduction
        train()
        equal(weight.numpy(), total)
    assert train.tracing_count == 3


def test_a_part_that_is_jitted_is_traced_again(two):
    with two.scope():
        model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    model.kernel[...] = jnp.zeros((3, 1))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: -jnp.mean(model(x)))(model))

    @rx.function
    def train(x: Any) -> None:
        two.run(step, args=(model, optimizer, x))

    for reduction, total in (("SUM", 2.0), ("MEAN", 3.0), ("SUM", 5.0)):
        two.gradient_reduction = reduction
        train(shares(two, np.ones((4, 3), np.float32)))
        equal(model.kernel[...], np.full((3, 1), total))


def test_what_is_no_reduction_is_refused(two):
    with pytest.raises(InvalidArgument, match=r"Unknown GradientReduction: 'MAX'\. Use one of SUM"):
        two.gradient_reduction = "MAX"
    assert two.gradient_reduction is rx.GradientReduction.SUM

    def step() -> None:
        two.gradient_reduction = "MEAN"

    for fn in (step, rx.function(step)):
        with pytest.raises(ContextError, match="Set it outside"):
            two.run(fn)
    with two.scope():
        two.gradient_reduction = rx.GradientReduction.MEAN
    assert two.gradient_reduction is rx.GradientReduction.MEAN


@pytest.mark.parametrize(
    ("shapes", "weights"),
    [
        ([], [1.0, 1.0]),
        ([[(), ()]], [1.0, 1.0]),
        ([[(2, 5), (2, 5)], [(2,), (2,)]], [1.0, 1.0]),
        ([[(3,), (1,)]], [1.5, 0.5]),
        ([[(3, 2), (1, 2)], [(3,), (1,)], [(), ()]], [1.5, 0.5]),
        ([[(3,), (0,)]], [2.0, 0.0]),
        ([[(0,), (0,)]], [0.0, 0.0]),
        ([[(3,), (1,)], [(2,), (2,)]], [1.0, 1.0]),
        ([[(3,), ()]], [1.0, 1.0]),
    ],
)
def test_weights_of_rows(shapes, weights):
    assert row_weights(shapes, 2) == weights


# Gradients that have been reduced already.


def all_reduced(op: str) -> Change:
    return lambda gradients: rx.get_replica_context().all_reduce(op, gradients)


def reduced_by(reduce: Callable[[Any, str], Any]) -> Change:
    return lambda gradients: jax.tree.map(lambda g: reduce(g, "replica"), gradients)


def clipped(change: Change) -> Change:
    return lambda gradients: jax.tree.map(lambda g: jnp.clip(g * 0.5, -1, 1), change(gradients))


REDUCED = {
    "sum": all_reduced("SUM"),
    "mean": all_reduced("MEAN"),
    "mean, clipped": clipped(all_reduced("MEAN")),
}
IN_PROGRAMS = {
    "psum": reduced_by(jax.lax.psum),
    "pmean": reduced_by(jax.lax.pmean),
    "pmean, clipped": clipped(reduced_by(jax.lax.pmean)),
}
CASES = [(change, compiled) for change in REDUCED for compiled in (False, True)]
CASES += [(change, True) for change in IN_PROGRAMS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("change", "compiled"), CASES)
def test_sums_of_what_was_reduced_are_warned_of_once(way, change, compiled, two, monkeypatch):
    monkeypatch.setattr(_once, "_said", _once._Said())  # that of NNX is the same in every test
    with two.scope():
        step, _ = WAYS[way]({**REDUCED, **IN_PROGRAMS}[change])
    step = rx.function(step) if compiled else step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SummedTwice)
        for _ in range(2):
            two.run(step, args=(shares(two, BATCHES[0]),))
    (told,) = (each for each in caught if each.category is SummedTwice)
    assert told.filename == __file__
    assert f"{__file__}:{told.lineno}" in str(told.message)


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["mean", "mean, clipped"])
def test_nothing_is_said_where_it_is_meant(way, change, two):
    two.gradient_reduction = "NONE"  # warnings are errors in tests
    with two.scope():
        step, weight = WAYS[way](REDUCED[change])
    x = BATCHES[0]
    two.run(step, args=(shares(two, x),))
    gradient = 2 * x.T @ (x @ START - 1.0) / len(x)
    gradient = np.clip(gradient * 0.5, -1, 1) if "clipped" in change else gradient
    equal(weight(), START - RATE * gradient, MEAN_ERROR)


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_of_gradients_that_differ(way, two):
    def scaled(gradients: Any) -> Any:
        """By the norm over all replicas, which every replica knows; the gradients differ still."""
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))
        norm = jnp.sqrt(rx.get_replica_context().all_reduce("SUM", squares))
        return jax.tree.map(lambda g: g / norm, gradients)

    with two.scope():
        step, _ = WAYS[way](scaled)
    two.run(step, args=(shares(two, BATCHES[0]),))
