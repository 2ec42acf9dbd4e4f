"""Nests of variables."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import replicax as rx


@dataclasses.dataclass
class Params:
    kernel: object
    bias: object


@struct.dataclass
class State:
    kernel: object
    bias: object


KERNEL, BIAS = np.ones((3, 2), np.float32), np.zeros(2, np.float32)
NESTS = {
    "dict": lambda: {"kernel": KERNEL, "bias": BIAS},
    "tuple": lambda: (KERNEL, [BIAS]),
    "dataclass": lambda: Params(KERNEL, BIAS),
    "flax struct": lambda: State(KERNEL, BIAS),
    "equinox": lambda: eqx.nn.Linear(2, 3, key=jax.random.key(0)),
}


def apply(nest, x):
    """Return a linear layer's output, wherever its arrays are."""
    if isinstance(nest, eqx.Module):
        return jax.vmap(nest)(x)
    kernel, bias = rx.variables(nest) if rx.variables(nest) else jax.tree.leaves(nest)
    if kernel.ndim == 1:  # dictionaries and dataclasses are in another order
        kernel, bias = bias, kernel
    return x @ kernel + bias


@pytest.mark.parametrize("kind", NESTS)
def test_a_nest_of_variables_trains_as_its_arrays_do(mirrored_strategy, execution, kind):
    strategy = mirrored_strategy
    nest = NESTS[kind]()
    width = 2 if kind == "equinox" else 3
    rows = np.random.default_rng(1).normal(size=(8, width)).astype(np.float32)
    with strategy.scope():
        params = rx.make_variables(nest)
        optimizer = rx.Optimizer(optax.sgd(0.1))
    assert len(rx.variables(params)) == 2

    def step(rows):
        def loss():
            return (apply(params, rows) ** 2).sum() / 8

        value, gradients = rx.value_and_grad(loss, params)()
        optimizer.apply_gradients(gradients, params)
        return value

    for _ in range(2):
        result = strategy.run(step, args=(strategy.split(rows),))
    values = rx.read(params)

    arrays, structure = jax.tree.flatten(nest, is_leaf=lambda leaf: isinstance(leaf, Params))
    if kind == "dataclass":
        arrays = [nest.kernel, nest.bias]
        values = [values.kernel, values.bias]
        rebuild = lambda leaves: {"kernel": leaves[0], "bias": leaves[1]}  # noqa: E731
    else:
        values = jax.tree.leaves(values)
        rebuild = structure.unflatten
    for _ in range(2):
        loss, gradients = jax.value_and_grad(
            lambda leaves: (apply(rebuild(leaves), rows) ** 2).sum() / 8
        )(arrays)
        arrays = [a - 0.1 * g for a, g in zip(arrays, gradients, strict=True)]
    for ours, theirs in zip(values, arrays, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(strategy.reduce("SUM", result, axis=None), loss, rtol=1e-5)


def test_names_are_places_and_other_leaves_stay(two):
    nest = {"layers": [{"w": KERNEL}, {"w": KERNEL}], "act": jax.nn.relu, "n": 3, "i": np.arange(2)}
    with two.scope():
        made = rx.make_variables(nest, name="net")
    assert [v.name for v in rx.variables([made["layers"], made["i"]])] == [
        "net/layers/0/w",
        "net/layers/1/w",
        "net/i",
    ]
    assert isinstance(made["i"], rx.Variable)
    assert (made["act"], made["n"]) == (jax.nn.relu, 3)
    assert made["layers"][0]["w"].trainable
    assert not made["i"].trainable
    with pytest.raises(rx.errors.InvalidType, match="variables already, such as 'net/i'"):
        rx.make_variables(made)


def test_jax_tree_map_sees_the_values(two):
    with two.scope():
        params = rx.make_variables({"w": KERNEL})
    doubled = jax.tree.map(lambda w: 2 * w, params)
    np.testing.assert_allclose(doubled["w"], 2 * KERNEL)


def test_a_nest_is_assigned_to_as_a_whole_or_not_at_all(strategy):
    with strategy.scope():
        params = rx.make_variables({"a": KERNEL, "b": BIAS, "name": 1})
    rx.assign(params, {"a": KERNEL * 3, "b": jnp.ones(2), "name": 1})
    np.testing.assert_allclose(rx.read(params)["a"], KERNEL * 3)
    with pytest.raises(rx.errors.ShapeMismatch, match=r"variable 'b' of shape \(2,\)"):
        rx.assign(params, {"a": KERNEL, "b": jnp.ones(3), "name": 1})
    with pytest.raises(rx.errors.StructureMismatch, match="in the same nest"):
        rx.assign(params, {"a": KERNEL})
    with pytest.raises(TypeError):
        rx.assign(params, {"a": KERNEL, "b": np.ones(2, complex), "name": 1})
    np.testing.assert_allclose(rx.read(params)["a"], KERNEL * 3)
    other = rx.make_variables({"a": KERNEL, "b": BIAS, "name": 1})
    rx.assign(other, params)
    np.testing.assert_allclose(rx.read(other)["a"], KERNEL * 3)
