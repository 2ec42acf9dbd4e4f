"""Programs of JAX users train on replicas as they do on one device."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from conftest import STRATEGIES, mirrored
from jax_programs import (
    BATCH,
    KINDS,
    ROWS,
    OneDevice,
    Place,
    Program,
    Replicas,
    dict_and_sgd,
    equinox_frozen_and_dropout,
    variables_and_optimizer,
)

import replicax as rx

pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")

STEPS = 3
Kind = Callable[[Place], Program]
REPLICAS = {"mirrored 2": mirrored(2), "mirrored 4": mirrored(4)}


@pytest.fixture(params=STRATEGIES if "workers" in STRATEGIES else REPLICAS)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    """Two replicas, four, or those of all workers."""
    return {**REPLICAS, **STRATEGIES}[request.param]()


def numbers(nest: Any) -> list[Any]:
    """Return what is not static: arrays, distributed values and numbers."""
    leaves = jax.tree.leaves(nest, is_leaf=lambda leaf: isinstance(leaf, rx.DistributedValues))
    kinds = (jax.Array, np.ndarray, rx.DistributedValues, int, float)
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def as_numpy(value: Any) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


@functools.cache
def on_one_device(kind: Kind) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Train by plain JAX; return the numbers before and after, and the last loss."""
    program = kind(OneDevice())
    state, step = program.state, program.jit(program.step)
    before = [as_numpy(value) for value in numbers(program.read(state))]
    for _ in range(STEPS):
        state, loss = step(state, BATCH)
    return before, [as_numpy(value) for value in numbers(program.read(state))], float(loss)


def check(strategy: rx.Strategy, kind: Kind, program: Program, state: Any, loss: Any) -> None:
    """Compare what every replica of this process has with the plain program."""
    before, expected, expected_loss = on_one_device(kind)
    tolerance = program.tolerance
    moved = [np.abs(a - b).max(initial=0) for a, b in zip(expected, before, strict=True)]
    assert max(moved) > 20 * tolerance, "nothing was trained"
    actual = numbers(program.read(state))
    assert len(actual) == len(expected)
    for value, wanted in zip(actual, expected, strict=True):
        for component in strategy.experimental_local_results(value):
            np.testing.assert_allclose(as_numpy(component), wanted, tolerance, tolerance)
    loss = strategy.reduce("MEAN", loss, axis=None)
    np.testing.assert_allclose(float(loss), expected_loss, tolerance, tolerance)


def check_division(compiled: jax.stages.Compiled, strategy: rx.Strategy) -> None:
    """Make sure that a program is one of all devices, each of which has its own rows only."""
    devices = [sharding.device_set for sharding in jax.tree.leaves(compiled.input_shardings)]
    assert {len(each) for each in devices} == {strategy.num_replicas_in_sync}
    text = compiled.as_text()
    assert text is not None
    assert f"num_partitions={strategy.num_replicas_in_sync}" in text
    shapes = [
        [int(size) for size in shape.split(",")] for shape in re.findall(r"\w\[([\d,]+)\]", text)
    ]
    share = ROWS // strategy.num_replicas_in_sync
    # In microbatches, a replica's rows are two halves.
    assert any(shape[0] == share or shape[:2] == [2, share // 2] for shape in shapes)
    for shape in shapes:
        assert ROWS not in shape
        assert shape[:2] != [2, ROWS // 2]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_compiled_replicas_train_as_one_device_on_the_whole_batch(strategy, kind):
    program = kind(Replicas(strategy))

    @rx.function
    def train_step(state, batch):
        return strategy.run(program.step, args=(state, batch))

    state, batch = program.state, strategy.split(BATCH)
    for _ in range(STEPS):
        state, loss = train_step(state, batch)
    check(strategy, kind, program, state, loss)
    # Among workers, the state of `equinox_state` is another kind of argument when it comes back.
    again = int(strategy.topology.spans_processes)
    assert program.traces <= train_step.tracing_count <= program.traces + again
    check_division(train_step.lower(state, batch).compile(), strategy)


@pytest.mark.parametrize(
    "kind", [variables_and_optimizer, equinox_frozen_and_dropout], ids=lambda kind: kind.__name__
)
def test_eager_replicas_train_as_one_device_on_the_whole_batch(strategy, kind):
    program = kind(Replicas(strategy))
    state, batch = program.state, strategy.split(BATCH)
    for _ in range(STEPS):
        state, loss = strategy.run(program.step, args=(state, batch))
    check(strategy, kind, program, state, loss)


class ByName(Replicas):
    def mean(self, nest):
        return jax.lax.pmean(nest, "replica")


@pytest.mark.parametrize("jit", ["none", "jax.jit", "eqx.filter_jit"])
def test_collectives_of_jax_find_the_replicas_by_name(strategy, jit):
    """The same holds if the step is compiled by itself."""
    import equinox as eqx

    transform = {"none": lambda step: step, "jax.jit": jax.jit, "eqx.filter_jit": eqx.filter_jit}
    program = dict_and_sgd(ByName(strategy))
    step = rx.function(transform[jit](program.step))
    state, batch = program.state, strategy.split(BATCH)
    for _ in range(STEPS):
        state, loss = strategy.run(step, args=(state, batch))
    check(strategy, dict_and_sgd, program, state, loss)


def test_eagerly_the_replicas_have_no_name(strategy):
    program = dict_and_sgd(ByName(strategy))
    with pytest.raises(NameError, match="replica") as caught:
        strategy.run(program.step, args=(program.state, strategy.split(BATCH)))
    assert any("all_reduce" in note for note in caught.value.__notes__)
