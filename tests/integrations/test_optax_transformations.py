"""Every transformation of Optax's public list, on two replicas, against Optax on one device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support import equal, shares

import replicax as rx

STEPS, ROWS = 3, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(STEPS, ROWS, 3)).astype(np.float32)
Y = RANDOM.normal(size=(STEPS, ROWS, 2)).astype(np.float32)
KERNEL = RANDOM.normal(size=(3, 2)).astype(np.float32)
BIAS = np.float32([0.5, -0.25])
RATE = 0.1


def by_path(params: Any) -> Any:
    """A mask that only a nest with names can satisfy."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def labels(params: Any) -> Any:
    return {"layer": {"kernel": "trained", "bias": "fixed"}}


def sgd() -> Any:
    return optax.sgd(RATE)


def only_kernel(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda g: g * 2, updates)


# How to make each: with which arguments, or by a function.
RATES = (RATE,)
WITH_RATE = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion
nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop
scale_by_rprop sgd sign_sgd signum sm3 yogi contrib.acprop contrib.ademamix contrib.adopt
contrib.dadapt_adamw contrib.dog contrib.dowg contrib.galore contrib.madgrad contrib.momo
contrib.momo_adam contrib.muon contrib.prodigy contrib.scale_by_madgrad contrib.schedule_free_adamw
contrib.schedule_free_sgd contrib.simplified_ademamix
"""
WITHOUT_ARGUMENTS = """
apply_every centralize identity keep_params_nonnegative normalize_by_update_norm polyak_sgd
scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief
scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_lion
scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms
scale_by_polyak scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev
scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans contrib.cocob contrib.normalize
contrib.reduce_on_plateau contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt
contrib.scale_by_cocob contrib.scale_by_galore contrib.scale_by_simplified_ademamix
"""
ARGUMENTS: dict[str, tuple[Any, ...] | Callable[[], Any]] = {
    **dict.fromkeys(WITH_RATE.split(), RATES),
    **dict.fromkeys(WITHOUT_ARGUMENTS.split(), ()),
    "adaptive_grad_clip": (0.1,),
    "add_decayed_weights": (0.1, by_path),
    "add_noise": (0.1, 0.5, jax.random.key(0)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE, mask=by_path)),
    "clip": (0.1,),
    "clip_by_block_rms": (0.1,),
    "clip_by_global_norm": (0.1,),
    "conditionally_mask": lambda: optax.conditionally_mask(sgd(), lambda n: n < 2),
    "conditionally_transform": lambda: optax.conditionally_transform(
        sgd(), lambda count: count < 2
    ),
    "contrib.mechanize": lambda: optax.contrib.mechanize(sgd()),
    "contrib.sam": lambda: optax.contrib.sam(sgd(), optax.sgd(0.01), sync_period=2),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(sgd(), RATE),
    "contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(sgd()),
    "ema": (0.9,),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "freeze": lambda: optax.freeze({"layer": {"kernel": False, "bias": True}}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(RATE, 0.0, 5)
    ),
    "lbfgs": lambda: optax.lbfgs(RATE, linesearch=None),
    "lookahead": lambda: optax.lookahead(optax.sgd(RATE), sync_period=2, slow_step_size=0.5),
    "masked": lambda: optax.masked(optax.adam(RATE), by_path),
    "monitor": lambda: optax.chain(
        sgd(),
        optax.monitor({"n": optax.tree.norm, "e": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"trained": optax.adam(RATE), "fixed": optax.set_to_zero()}, labels
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), every_k_schedule=2),
    "named_chain": lambda: optax.named_chain(("first", optax.clip(0.5)), ("second", sgd())),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
    "partition": lambda: optax.partition({"trained": sgd(), "fixed": optax.set_to_zero()}, labels),
    "scale": (0.5,),
    "scale_by_learning_rate": RATES,
    "scale_by_schedule": (optax.linear_schedule(1.0, 0.0, 5),),
    "selective_transform": lambda: optax.selective_transform(sgd(), freeze_mask=by_path),
    "snapshot": ("gradients", lambda updates: updates),
    "stateless": (only_kernel,),
    "stateless_with_tree_map": (lambda g, p: g + 0.1 * p,),
    "trace": (0.9,),
    "with_extra_args_support": lambda: optax.with_extra_args_support(sgd()),
}
EXCLUDED = {
    "contrib.differentially_private_aggregate": "takes the gradients of every example",
    "contrib.dpsgd": "takes the gradients of every example",
    "per_example_global_norm_clip": "takes the gradients of every example",
    "per_example_layer_norm_clip": "takes the gradients of every example",
    "contrib.hutchinson_estimator_diag_hessian": "takes the loss as a function of the params",
    "contrib.sophia": "takes the loss as a function of the params",
    "contrib.scale_by_muon": "takes matrices alone; it is the part of `muon` for these",
    "scale_by_backtracking_linesearch": "a line search; refused, see test_optax_nests.py",
    "scale_by_zoom_linesearch": "a line search; refused, see test_optax_nests.py",
    "inject_stateful_hyperparams": "deprecated: `inject_hyperparams`",
    "optimistic_adam": "deprecated: `optimistic_adam_v2`",
    "measure_with_ema": "a measure of `monitor`, where it is tested",
}
MODULES = {"": optax, "contrib.": optax.contrib}
# With what `update` is called besides gradients and params.
WITH_VALUE = {
    "polyak_sgd", "scale_by_polyak", "contrib.reduce_on_plateau", "contrib.momo",
    "contrib.momo_adam",
}  # fmt: skip
# Replicas sum in another order, and these divide by what is near zero.
ROUGH = {"contrib.muon": 1e-4, "contrib.scale_by_muon": 1e-4, "contrib.galore": 1e-4,
         "contrib.scale_by_galore": 1e-4}  # fmt: skip


def public_transformations() -> list[str]:
    """The names of the functions that return a transformation, or take one; and the wrappers."""
    found = []
    for prefix, module in MODULES.items():
        for name, thing in vars(module).items():
            if inspect.isfunction(thing) and not name.startswith("_"):
                told = inspect.signature(thing)
                types = [told.return_annotation, *(p.annotation for p in told.parameters.values())]
                if "GradientTransformation" in str(types):
                    found.append(f"{prefix}{name}")
    return found


def make(name: str) -> Any:
    arguments = ARGUMENTS[name]
    if not isinstance(arguments, tuple):
        return arguments()
    *_, last = name.split(".")
    tx = getattr(optax.contrib if "." in name else optax, last)(*arguments)
    # By itself it would go up the slope, to large numbers that differ by their rounding.
    return tx if arguments is RATES else optax.chain(tx, optax.scale(-RATE))


def exists(name: str) -> bool:
    *_, last = name.split(".")
    return hasattr(optax.contrib if "." in name else optax, last)


def loss_of(params: Any, x: Any, y: Any) -> Any:
    layer = params["layer"]
    return jnp.sum((x @ layer["kernel"] + layer["bias"] - y) ** 2) / ROWS


def extra_of(name: str, value: Any) -> dict[str, Any]:
    return {"value": value} if name in WITH_VALUE else {}


def on_one_device(names: Sequence[str]) -> dict[str, list[np.ndarray]]:
    """Train with each by itself; all in one program, since compiling takes longer than running."""
    layer: Any = {"layer": {"kernel": jnp.asarray(KERNEL), "bias": jnp.asarray(BIAS)}}
    params = dict.fromkeys(names, layer)
    if "lookahead" in params:
        params["lookahead"] = optax.LookaheadParams.init_synced(layer)
    transformations = {name: make(name) for name in names}
    state = {name: tx.init(params[name]) for name, tx in transformations.items()}

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        params, state = dict(params), dict(state)
        for name, tx in transformations.items():
            own = params[name]
            fast = own.fast if name == "lookahead" else own
            value, gradients = jax.value_and_grad(loss_of)(fast, x, y)
            extra = extra_of(name, value)
            updates, state[name] = tx.update(gradients, state[name], own, **extra)
            params[name] = optax.apply_updates(own, updates)
        return params, state

    for x, y in zip(X, Y, strict=True):
        params, state = step(params, state, x, y)
    return {name: jax.tree.leaves((params[name], state[name])) for name in names}


def on_replicas(names: Sequence[str], compiled: bool) -> dict[str, list[Any]]:
    """The same on two replicas."""
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    def variables() -> Any:
        return {"layer": {"kernel": rx.Variable(KERNEL), "bias": rx.Variable(BIAS)}}

    with strategy.scope():
        fast = {name: variables() for name in names}
        params = dict(fast)
        if "lookahead" in params:
            params["lookahead"] = optax.LookaheadParams(fast["lookahead"], variables())
        optimizers = {name: rx.Optimizer(make(name)) for name in names}

    def replica_step(x: Any, y: Any) -> None:
        for name, optimizer in optimizers.items():
            value, gradients = rx.value_and_grad(
                lambda own=fast[name]: loss_of(own, x, y), fast[name]
            )()
            optimizer.update(gradients, params[name], **extra_of(name, value))

    step = rx.function(replica_step) if compiled else replica_step
    for x, y in zip(X, Y, strict=True):
        strategy.run(step, args=(shares(strategy, x), shares(strategy, y)))
    return {
        name: [*rx.variables(params[name]), *optimizer.variables[1:]]
        for name, optimizer in optimizers.items()
    }


NAMES = [name for name in ARGUMENTS if exists(name)]
GROUP = 6  # as a larger program compiles for longer than its parts
EAGER = ("adamw", "masked", "MultiSteps", "lookahead", "multi_transform")


@functools.cache
def results(names: tuple[str, ...], compiled: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return on_one_device(names), on_replicas(names, compiled)


@pytest.fixture(autouse=True, scope="module")
def _forgotten() -> Iterator[None]:
    yield
    results.cache_clear()


def test_every_transformation_is_in_a_table():
    assert set(public_transformations()) <= {*ARGUMENTS, *EXCLUDED}
    assert not set(ARGUMENTS) & set(EXCLUDED)


@pytest.mark.parametrize(
    ("name", "compiled"), [(name, True) for name in NAMES] + [(name, False) for name in EAGER]
)
def test_it_equals_optax_on_one_device(name, compiled):
    start = NAMES.index(name) // GROUP * GROUP
    group = tuple(NAMES[start : start + GROUP]) if compiled else EAGER
    expected, actual = results(group, compiled)
    for variable, array in zip(actual[name], expected[name], strict=True):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            equal(jax.random.key_data(variable.value), jax.random.key_data(array))
        else:
            equal(variable.numpy(), array, ROUGH.get(name, 2e-6))
