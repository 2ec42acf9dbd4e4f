"""Small versions of training programs that users of JAX, Optax, Equinox and Flax linen write.

Each is a function that makes a `Program`: its initial state, and its step. The step is the user's
own but for one call, `place.mean(gradients)`, which does nothing on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

# It divides over two and four replicas, in two microbatches each; nothing else has this size.
ROWS = 88
FEATURES = 3
WIDTH = 5
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True)).astype(np.float32)
KEYS = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), ROWS)))
BATCH = {"x": X, "y": Y, "keys": KEYS}

Batch = dict[str, Any]
Params = Any


class Place(Protocol):
    """The place where a program runs: one device or several replicas."""

    axis: str | None  # the name by which JAX's collectives find the replicas

    def mean(self, nest: Any) -> Any:
        """Return the mean over the replicas."""
        ...


class OneDevice:
    """Plain JAX on the whole batch."""

    axis = None

    def mean(self, nest: Any) -> Any:
        return nest


@dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy."""

    strategy: rx.Strategy
    axis = "replica"

    def mean(self, nest: Any) -> Any:
        context = rx.get_replica_context()
        assert context is not None
        return context.all_reduce("MEAN", nest)


@dataclass(frozen=True)
class Program:
    """One kind of program, ready to train."""

    state: Any
    step: Callable[[Any, Batch], tuple[Any, Any]]  # (state, batch) -> (state, loss)
    read: Callable[[Any], Any] = lambda state: state  # the numbers that training has changed
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
    tolerance: float = 1e-6
    traces: int = 1  # of a compiled step


def dense(params: Params, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["second"]["w"] + params["second"]["b"]


def dense_params() -> Params:
    first, second = jax.random.split(jax.random.key(1))
    return {
        "first": {
            "w": jax.random.normal(first, (FEATURES, WIDTH)) / 2,
            "b": jnp.zeros(WIDTH),
        },
        "second": {"w": jax.random.normal(second, (WIDTH, 1)) / 2, "b": jnp.zeros(1)},
    }


def loss_of(params: Params, batch: Batch) -> Any:
    return jnp.mean((dense(params, batch["x"]) - batch["y"]) ** 2)


def dict_and_sgd(place: Place) -> Program:
    """Make a program with a dict of arrays, and SGD by hand."""

    def step(params: Params, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        grads = place.mean(grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return Program(dense_params(), step)


def functional(
    place: Place,
    tx: optax.GradientTransformation,
    params: Params = None,
    loss_fn: Callable[[Params, Batch], Any] = loss_of,
    **options: Any,
) -> Program:
    """Make a program with an Optax transformation, whose state is passed with the parameters."""
    params = dense_params() if params is None else params

    def step(state: Any, batch: Batch) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(place.mean(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Program((params, tx.init(params)), step, **options)


def dict_and_optax(place: Place) -> Program:
    return functional(place, optax.adam(0.05))


def variables_and_optimizer(place: Place) -> Program:
    """Make a program with a nest of variables and an `rx.Optimizer`, against the functional one."""
    if not isinstance(place, Replicas):
        program = functional(place, optax.adam(0.05))
        return Program(program.state, program.step, lambda state: state[0])
    strategy = place.strategy
    with strategy.scope():
        params = rx.make_variables(dense_params())
        optimizer = rx.Optimizer(optax.adam(0.05), reduction="MEAN")

    def step(state: None, batch: Batch) -> Any:
        loss, grads = rx.value_and_grad(lambda: loss_of(params, batch), params)()
        optimizer.apply_gradients(grads, params)
        return state, loss

    return Program(None, step, lambda _: rx.read(params))


def equinox_module(place: Place) -> Program:
    """Make a program whose parameters are a module; only its arrays are differentiated."""
    import equinox as eqx

    model = eqx.nn.MLP(FEATURES, 1, WIDTH, 2, activation=jnp.tanh, key=jax.random.key(2))
    tx = optax.adam(0.05)

    @eqx.filter_value_and_grad
    def loss_fn(model: Any, batch: Batch) -> Any:
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    def step(state: Any, batch: Batch) -> Any:
        model, opt_state = state
        loss, grads = loss_fn(model, batch)
        updates, opt_state = tx.update(place.mean(grads), opt_state)
        return (eqx.apply_updates(model, updates), opt_state), loss

    state = (model, tx.init(eqx.filter(model, eqx.is_array)))
    return Program(state, step, jit=eqx.filter_jit)


def equinox_variables(place: Place) -> Program:
    """Make a program in which the arrays of a module are variables; its functions stay."""
    import equinox as eqx

    if not isinstance(place, Replicas):
        program = equinox_module(place)
        return Program(program.state, program.step, lambda state: state[0], program.jit)
    with place.strategy.scope():
        model = rx.make_variables(
            eqx.nn.MLP(FEATURES, 1, WIDTH, 2, activation=jnp.tanh, key=jax.random.key(2))
        )
        optimizer = rx.Optimizer(optax.adam(0.05), reduction="MEAN")

    def step(state: None, batch: Batch) -> Any:
        def loss_fn() -> Any:
            return jnp.mean((jax.vmap(rx.read(model))(batch["x"]) - batch["y"]) ** 2)

        loss, grads = rx.value_and_grad(loss_fn, model)()
        optimizer.apply_gradients(grads, model)
        return state, loss

    return Program(None, step, lambda _: rx.read(model))


def equinox_frozen_and_dropout(place: Place) -> Program:
    """Make a program with a layer frozen by a filter, and a key per row for dropout."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(3), 2)
    first = eqx.nn.Linear(FEATURES, WIDTH, key=keys[0])
    layers = [first, eqx.nn.Dropout(0.5), eqx.nn.Linear(WIDTH, 1, key=keys[1])]
    is_trained = jax.tree.map(lambda _: False, layers)
    is_trained = eqx.tree_at(
        lambda tree: (tree[2].weight, tree[2].bias), is_trained, replace=(True, True)
    )
    trained, frozen = eqx.partition(layers, is_trained)
    tx = optax.sgd(0.1, momentum=0.9)

    def of_row(layers: Any, x: Any, key: Any) -> Any:
        first, dropout, last = layers
        return last(dropout(jnp.tanh(first(x)), key=jax.random.wrap_key_data(key)))

    def loss_fn(trained: Any, frozen: Any, batch: Batch) -> Any:
        layers = eqx.combine(trained, frozen)
        predicted = jax.vmap(of_row, in_axes=(None, 0, 0))(layers, batch["x"], batch["keys"])
        return jnp.mean((predicted - batch["y"]) ** 2)

    def step(state: Any, batch: Batch) -> Any:
        trained, frozen, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(trained, frozen, batch)
        updates, opt_state = tx.update(place.mean(grads), opt_state, trained)
        return (eqx.apply_updates(trained, updates), frozen, opt_state), loss

    state = (trained, frozen, tx.init(eqx.filter(trained, eqx.is_array)))
    return Program(state, step, jit=eqx.filter_jit)


def equinox_state(place: Place) -> Program:
    """Make a program with batch normalization over the whole batch, with an `eqx.nn.State`."""
    import equinox as eqx

    axes = "row" if place.axis is None else ("row", place.axis)

    class Normalized(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=keys[0])
            self.norm = eqx.nn.BatchNorm(WIDTH, axis_name=axes, mode="batch")
            self.last = eqx.nn.Linear(WIDTH, 1, key=keys[1])

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jnp.tanh(x)), state

    model, norm_state = eqx.nn.make_with_state(Normalized)(jax.random.key(4))
    tx = optax.adam(0.05)

    def loss_fn(model: Any, norm_state: Any, batch: Batch) -> Any:
        batched = jax.vmap(model, axis_name="row", in_axes=(0, None), out_axes=(0, None))
        predicted, norm_state = batched(batch["x"], norm_state)
        return jnp.mean((predicted - batch["y"]) ** 2), norm_state

    def step(state: Any, batch: Batch) -> Any:
        model, norm_state, opt_state = state
        derivative = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, norm_state), grads = derivative(model, norm_state, batch)
        updates, opt_state = tx.update(place.mean(grads), opt_state)
        return (eqx.apply_updates(model, updates), norm_state, opt_state), loss

    state = (model, norm_state, tx.init(eqx.filter(model, eqx.is_array)))
    return Program(state, step, jit=eqx.filter_jit)


def linen_train_state(place: Place) -> Program:
    """Make a program with a `TrainState` of Flax linen, and batch statistics beside it."""
    import flax.linen as nn
    from flax.training.train_state import TrainState

    class Normalized(nn.Module):
        axis: str | None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(WIDTH, use_bias=False)(x)  # Adam would train rounding errors in a bias
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(x)
            return nn.Dense(1)(nn.relu(x))

    class State(TrainState):
        batch_stats: Any

    # The axis name of the replicas exists only in their program.
    variables = Normalized(None).init(jax.random.key(5), X[:2])
    state = State.create(
        apply_fn=Normalized(place.axis).apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adamw(0.05),
    )

    def step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Params) -> Any:
            predicted, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"],
                mutable=["batch_stats"],
            )
            return jnp.mean((predicted - batch["y"]) ** 2), changed["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=place.mean(grads), batch_stats=batch_stats), loss

    return Program(state, step, traces=2)  # the number of steps begins as a Python number


def averaged_params(place: Place) -> Program:
    """Make a program with an exponential moving average of the parameters, and its step count."""
    params, tx = dense_params(), optax.sgd(0.1)
    ema = optax.ema(0.9)

    def step(state: Any, batch: Batch) -> Any:
        params, opt_state, ema_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(place.mean(grads), opt_state, params)
        params = optax.apply_updates(params, updates)
        _, ema_state = ema.update(params, ema_state)
        return (params, opt_state, ema_state), loss

    return Program((params, tx.init(params), ema.init(params)), step)


def clipped_and_scheduled(place: Place) -> Program:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)
    # Some gradients of the first steps are clipped, and some are not.
    return functional(place, optax.chain(optax.clip_by_global_norm(0.8), optax.adamw(schedule)))


def multi_steps(place: Place) -> Program:
    return functional(place, optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation())


def schedule_free(place: Place) -> Program:
    return functional(place, optax.contrib.schedule_free_adamw(0.05))


def checkpoint_and_vmap(place: Place) -> Program:
    """Make a program with `vmap` over a loss of one row, whose activations are recomputed."""

    @jax.checkpoint
    def of_row(params: Params, x: Any, y: Any) -> Any:
        return jnp.sum((dense(params, x) - y) ** 2)

    def loss_fn(params: Params, batch: Batch) -> Any:
        return jax.vmap(of_row, in_axes=(None, 0, 0))(params, batch["x"], batch["y"]).mean()

    return functional(place, optax.adam(0.05), loss_fn=loss_fn)


def bfloat16(place: Place) -> Program:
    """Make a program with 16-bit parameters: gradients are rounded before they are averaged."""
    params = jax.tree.map(lambda array: array.astype(jnp.bfloat16), dense_params())

    def loss_fn(params: Params, batch: Batch) -> Any:
        predicted = dense(params, batch["x"].astype(jnp.bfloat16))
        return jnp.mean((predicted.astype(jnp.float32) - batch["y"]) ** 2)

    return functional(place, optax.sgd(0.1), params, loss_fn, tolerance=1e-2)


def scan_over_layers(place: Place) -> Program:
    """Make a program with a `lax.scan` over layers of one shape."""
    params = dense_params()
    params["layers"] = jax.random.normal(jax.random.key(6), (4, WIDTH, WIDTH)) / 2

    def loss_fn(params: Params, batch: Batch) -> Any:
        x = batch["x"] @ params["first"]["w"] + params["first"]["b"]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        predicted = x @ params["second"]["w"] + params["second"]["b"]
        return jnp.mean((predicted - batch["y"]) ** 2)

    return functional(place, optax.adam(0.05), params, loss_fn)


def scan_over_microbatches(place: Place) -> Program:
    """Make a program that adds up the gradients of two halves of the batch by `lax.scan`."""
    params, tx, halves = dense_params(), optax.adam(0.05), 2

    def step(state: Any, batch: Batch) -> Any:
        params, opt_state = state
        parts = jax.tree.map(lambda a: a.reshape(halves, -1, *a.shape[1:]), batch)

        def add(total: Any, part: Batch) -> Any:
            of_part = jax.value_and_grad(loss_of)(params, part)
            return jax.tree.map(jnp.add, total, of_part), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zeros, parts)
        loss, grads = jax.tree.map(lambda a: a / halves, total)
        updates, opt_state = tx.update(place.mean(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return Program((params, tx.init(params)), step)


KINDS: list[Callable[[Place], Program]] = [
    dict_and_sgd,
    dict_and_optax,
    variables_and_optimizer,
    equinox_module,
    equinox_variables,
    equinox_frozen_and_dropout,
    equinox_state,
    linen_train_state,
    averaged_params,
    clipped_and_scheduled,
    multi_steps,
    schedule_free,
    checkpoint_and_vmap,
    bfloat16,
    scan_over_layers,
    scan_over_microbatches,
]
