"""The kinds of training programs on Flax's and Optax's pages, in small, equal one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax_models import ROWS, TWO_AND_FOUR, Model, X, Y, nnx, require_divided, same, shared

import replicax as rx

STEPS = 4
Objects = tuple[Any, ...]


def squares(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).sum() / ROWS


_gradients = nnx.jit(nnx.grad(squares))  # eagerly, each operation takes 30 ms for each device


def descend(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> None:
    optimizer.update(model, _gradients(model, x, y))


def with_tx(make: Callable[[], Any]) -> Callable[[], Objects]:
    def kind() -> Objects:
        model = Model()
        return descend, model, nnx.Optimizer(model, make(), wrt=nnx.Param)

    return kind


class Average(nnx.Variable):
    """The moving average of a parameter."""


class Averages(nnx.Module):
    def __init__(self, model: nnx.Module, decay: float = 0.9):
        self.decay = decay
        self.of = nnx.data(jax.tree.map(Average, nnx.to_pure_dict(nnx.state(model, nnx.Param))))

    def update(self, model: nnx.Module) -> None:
        def move(average: Average, param: jax.Array) -> None:
            average[...] = self.decay * average[...] + (1 - self.decay) * param

        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        jax.tree.map(move, self.of, params, is_leaf=lambda x: isinstance(x, Average))


def averaged() -> Objects:
    def step(model, optimizer, averages, x, y):
        descend(model, optimizer, x, y)
        averages.update(model)

    model = Model()
    return step, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), Averages(model)


def adapted() -> Objects:
    """LoRA: only the small matrices next to the layers are trained."""
    adapters = nnx.DiffState(0, nnx.LoRAParam)

    def step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(squares, argnums=adapters)(model, x, y))

    model, rngs = Model(), nnx.Rngs(3)
    for name in ("first", "second"):
        layer = getattr(model, name)
        setattr(
            model,
            name,
            nnx.LoRA(
                layer.in_features, 2, layer.out_features, base_module=layer, rngs=rngs,
                b_initializer=nnx.initializers.normal(),
            ),
        )  # fmt: skip
    return step, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)


class Rematerialised(Model):
    def __call__(self, x):
        hidden = nnx.remat(lambda model, x: nnx.relu(model.first(x)))(self, x)
        return jax.checkpoint(lambda kernel, x: x @ kernel)(self.second.kernel[...], hidden)


def rematerialised() -> Objects:
    model = Rematerialised()
    return descend, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def by_rows() -> Objects:
    """`nnx.vmap` over the rows of a batch, and a gradient for each row, clipped by itself."""

    def step(model, optimizer, x, y):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x, y):
            return ((nnx.merge(graph, params, rest)(x) - y) ** 2).sum() / ROWS

        each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y)
        clipped, _ = optax.per_example_global_norm_clip(jax.tree.leaves(each), 0.1)
        optimizer.update(model, jax.tree.unflatten(jax.tree.structure(params), clipped))
        rows = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
        gradients = nnx.grad(lambda model: ((rows(model, x) - y) ** 2).sum() / ROWS)(model)
        optimizer.update(model, gradients)

    model = Model()
    return step, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def half_precision() -> Objects:
    model = nnx.Linear(4, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return descend, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


class Stacked(nnx.Module):
    """Layers as one, with their parameters stacked, one after the other by `nnx.scan`."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = layers(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, layer):
            return nnx.tanh(layer(x))

        return through(x, self.layers).sum(axis=1, keepdims=True)


def stacked() -> Objects:
    model = Stacked()
    return descend, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def steps_in_a_scan() -> Objects:
    """Two steps on each batch, the second with other inputs."""

    def step(model, optimizer, x, y):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def steps(carry, shift):
            model, optimizer = carry
            loss, gradients = nnx.value_and_grad(squares)(model, x + shift, y)
            optimizer.update(model, gradients)
            return carry, loss

        steps((model, optimizer), jnp.arange(2.0))

    model = Model()
    return step, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def steps_in_a_loop() -> Objects:
    def step(model, optimizer, x, y):
        def body(_, carry):
            descend(*carry, x, y)
            return carry

        nnx.fori_loop(0, 2, body, (model, optimizer))

    model = Model()
    return step, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


KINDS: dict[str, Callable[[], Objects]] = {
    "moving averages": averaged,
    "LoRA": adapted,
    "clipping": with_tx(lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))),
    "a schedule": with_tx(
        lambda: optax.inject_hyperparams(optax.adamw)(
            optax.warmup_cosine_decay_schedule(0.0, 0.2, 2, STEPS)
        )
    ),
    "accumulated gradients": with_tx(lambda: optax.MultiSteps(optax.adam(0.1), 2)),
    "without a schedule": with_tx(
        lambda: optax.contrib.schedule_free_adamw(0.1, warmup_steps=2, weight_decay=0.01)
    ),
    "rematerialised": rematerialised,
    "by rows": by_rows,
    "half precision": half_precision,
    "layers in a scan": stacked,
    "steps in a scan": steps_in_a_scan,
    "steps in a loop": steps_in_a_loop,
}
EAGER = ("moving averages", "LoRA", "clipping", "accumulated gradients", "layers in a scan")
TOLERANCE = {"half precision": 2e-2}


@functools.cache
def on_one_device(name: str) -> Objects:
    """Plain NNX, with the whole batch."""
    step, *objects = KINDS[name]()
    compiled = nnx.jit(step)
    for _ in range(STEPS):
        compiled(*objects, X, Y)
    return tuple(objects)


@pytest.fixture(params=TWO_AND_FOUR)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return TWO_AND_FOUR[request.param]()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_program_equals_one_device_and_is_divided(strategy, name):
    step, *objects = KINDS[name]()

    @rx.function
    def train(x, y):
        strategy.run(step, args=(*objects, x, y))

    for batch in shared(strategy, *[(X, Y)] * STEPS):
        train(*batch)
    same(tuple(objects), on_one_device(name), TOLERANCE.get(name, 1e-5))
    assert train.tracing_count == 1
    require_divided(strategy, train.lower(*batch).compile().as_text())


@pytest.mark.parametrize("name", EAGER)
def test_eager_kinds_equal_one_device(two, name):
    step, *objects = KINDS[name]()
    for batch in shared(two, *[(X, Y)] * STEPS):
        two.run(step, args=(*objects, *batch))
    same(tuple(objects), on_one_device(name))
