"""rx.Optimizer with nests of variables: what the transformation sees, and what is remembered."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equal, shares

import replicax as rx

ONES = np.ones((3, 2), np.float32)


class Pair(NamedTuple):
    w: Any
    b: Any


class Module(eqx.Module):
    w: Any
    b: Any
    name: str = eqx.field(static=True, default="module")


@flax.struct.dataclass
class Struct:
    w: Any
    b: Any


@dataclasses.dataclass
class Unregistered:
    w: Any
    b: Any


NESTS = {
    "dict": lambda w, b: {"w": w, "b": b},
    "nested": lambda w, b: {"layers": [{"w": w}, (b,)]},
    "tuple": lambda w, b: (w, b),
    "named tuple": Pair,
    "Equinox": Module,
    "flax.struct": Struct,
    "dataclass": Unregistered,
}


def seen() -> tuple[optax.GradientTransformation, list[Any]]:
    """A transformation that notes the structure of what it is given."""
    structures: list[Any] = []

    def init(params: Any) -> Any:
        structures.append(jax.tree.structure(params))
        return {"sum": jax.tree.map(jnp.zeros_like, params), "rule": abs, "number": 2, "none": None}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        structures.extend([jax.tree.structure(updates), jax.tree.structure(params)])
        assert state["rule"] is abs
        assert state["none"] is None
        total = jax.tree.map(jnp.add, state["sum"], updates)
        number = state["number"] + 1
        return jax.tree.map(lambda t: -t * number, total), {**state, "sum": total, "number": number}

    return optax.GradientTransformation(init, update), structures


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("kind", NESTS)
def test_the_transformation_sees_the_nest(kind, two):
    tx, structures = seen()
    with two.scope():
        w, b = rx.Variable(ONES), rx.Variable(np.float32([1, 2]))
        params = NESTS[kind](w, b)
        optimizer = rx.Optimizer(tx)

    def step() -> None:
        optimizer.apply_gradients(NESTS[kind](ONES, np.float32([0, 1])), params)

    for _ in range(2):
        two.run(step)
    equal(w.numpy(), ONES - 2 * 3 - 4 * 4)  # the sum of two replicas, then of two steps
    equal(b.numpy(), [1, 2 - 2 * 3 - 4 * 4])
    expected = jax.tree.structure(NESTS[kind](0, 0))
    if kind == "dataclass":  # which JAX takes for a leaf, so that Optax could do nothing with it
        expected = jax.tree.structure({".w": 0, ".b": 0})
    assert set(structures) == {expected}


def test_pairs_are_a_dict_by_name(two):
    tx, structures = seen()
    with two.scope():
        variables = [
            rx.Variable(1.0, name="w"), rx.Variable(1.0, name="w"), rx.Variable(1.0, name="w_1"),
            rx.Variable(1.0, name="a"),
        ]  # fmt: skip
        optimizer = rx.Optimizer(tx)
        pairs = [(float(index), variable) for index, variable in enumerate(variables)]
        optimizer.apply_gradients(pairs)
        optimizer.apply_gradients(reversed(pairs))
    assert set(structures) == {jax.tree.structure(dict.fromkeys(["a", "w", "w_1", "w_2"], 0))}
    for index, variable in enumerate(variables):
        equal(variable.numpy(), 1.0 - index * 3 - 2 * index * 4)


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("nested", [False, True])
def test_a_mask_by_name(two, nested):
    def mask(params: Any) -> Any:
        return {name: not name.startswith("bias") for name in params}

    with two.scope():
        params = {name: rx.Variable(ONES, name=name) for name in ("kernel", "bias")}
        optimizer = rx.Optimizer(optax.adamw(0.1, weight_decay=0.5, mask=mask))

    def step() -> None:
        zeros = {name: np.zeros_like(ONES) for name in params}
        if nested:
            optimizer.update(zeros, params)
        else:
            optimizer.apply_gradients([(zeros[name], params[name]) for name in params])

    two.run(step)
    equal(params["kernel"].numpy(), ONES * 0.95)
    equal(params["bias"].numpy(), ONES)


def test_another_nest_is_refused(two):
    with two.scope():
        w, b = rx.Variable(1.0, name="w"), rx.Variable(1.0, name="b")
        optimizer = rx.Optimizer(optax.sgd(1.0))
        optimizer.update({"x": 1.0, "y": 2.0}, {"x": w, "y": b})
        for other in ({"x": b, "y": w}, {"x": w, "z": b}, [w, b]):
            gradients = jax.tree.map(lambda _: 1.0, other, is_leaf=lambda x: x is w or x is b)
            with pytest.raises(rx.errors.StructureMismatch, match="same nest every time"):
                optimizer.update(gradients, other)
        optimizer.apply_gradients([(2.0, b), (1.0, w)])  # of which each says what it is for
        with pytest.raises(rx.errors.StructureMismatch, match="one gradient for each variable"):
            optimizer.update({"x": 1.0}, {"x": w, "y": b})
        with pytest.raises(rx.errors.InvalidArgument, match="twice"):
            optimizer.update([1.0, 1.0], [w, w])
    with pytest.raises(TypeError, match="in the place of a pair"):
        optimizer.apply_gradients([1.0])
    equal(w.numpy(), -1.0)
    equal(b.numpy(), -3.0)


@pytest.mark.usefixtures("execution")
def test_the_value_is_reduced_as_the_gradients_are(two):
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, scale: Any) -> Any:
        return jax.tree.map(lambda g: g * 0 + value * scale, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with two.scope():
        weights = [rx.Variable(0.0) for _ in range(3)]
        optimizers = [rx.Optimizer(tx, reduction=each) for each in ("sum", "mean", None)]

    def step(x: Any) -> None:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.update([x.sum()], [weight], value=x.sum(), scale=10.0)

    two.run(step, args=(shares(two, np.float32([1, 3])),))
    equal([weight.numpy() for weight in weights], [40.0, 20.0, 40.0])


def test_a_line_search_is_for_the_whole_batch(two):
    def loss(params: Any) -> Any:
        return jnp.sum((params["w"] - 3.0) ** 2)

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    tx = optax.chain(optax.sgd(1.0), search)
    start = {"w": jnp.float32([1.0, 2.0])}
    with two.scope():
        params = {"w": rx.Variable(start["w"])}
        optimizer = rx.Optimizer(tx)
    value, gradients = jax.value_and_grad(loss)(start)
    extra = {"value": value, "grad": gradients, "value_fn": loss}
    with pytest.raises(rx.errors.InvalidArgument, match=r"got `value_fn` in a function .* `run`"):
        two.run(lambda: optimizer.update(gradients, params, **extra))
    with two.scope():
        optimizer.update(gradients, params, **extra)
    updates, _ = tx.update(gradients, tx.init(start), start, **extra)
    equal(params["w"].numpy(), optax.apply_updates(start, updates)["w"])


def test_slots_are_beside_their_variables_and_named_after_them(tmp_path, two):
    def make(nest: Any) -> Any:
        with two.scope():
            w, b = rx.Variable(np.zeros((3, 2)), name="w"), rx.Variable(np.zeros(2), name="b")
            optimizer = rx.Optimizer(optax.adam(0.1), name="adam")
        return w, b, nest(w, b), optimizer, rx.Checkpoint(w=w, b=b, optimizer=optimizer)

    def train(nest: Any, params: Any, optimizer: rx.Optimizer) -> None:
        with two.scope():
            optimizer.update(nest(ONES, np.float32([1, 2])), params)

    lists, dicts = NESTS["nested"], NESTS["dict"]  # whose leaves are in another order
    w, b, params, optimizer, checkpoint = make(lists)
    train(lists, params, optimizer)
    names = {slot.name for slot in optimizer.variables[1:]}
    assert names == {"adam/[0].count", *(f"adam/{v}[0].{m}" for v in "wb" for m in ("mu", "nu"))}
    path = checkpoint.save(tmp_path / "model")
    train(lists, params, optimizer)
    other_w, other_b, other_params, other, checkpoint = make(dicts)
    checkpoint.restore(path)
    train(dicts, other_params, other)
    equal(other_w.numpy(), w.numpy())
    equal(other_b.numpy(), b.numpy())
