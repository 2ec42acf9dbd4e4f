"""Hooks into Keras: a few methods of its classes are wrapped.

Keras does not report when a model is created, nor for which model it queries a `Distribution`, and
its optimizers have no hook to combine gradients. Only methods that Keras documents are wrapped; for
models and optimizers without a strategy, they behave as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from replicax import _context
from replicax._typing import Nest
from replicax.collectives import CommunicationOptions
from replicax.errors import InvalidArgument
from replicax.execution import Site, warn_once
from replicax.input import DistributedDataset
from replicax.integrations.keras import _training
from replicax.integrations.keras._input import DistributedDataAdapter, agree, prepared
from replicax.integrations.keras._patches import Patches
from replicax.integrations.keras._records import records
from replicax.integrations.keras._scope import (
    distributed_by,
    follow,
    outside_of_functions,
    users_distribution,
)
from replicax.integrations.keras._signatures import takes_data_alone
from replicax.strategies import Strategy, get_replica_context, get_strategy


def install(patches: Patches) -> None:
    """Wrap Keras' methods."""
    patches.replace(keras.Model, "__new__", _remembering)
    if keras.backend.backend() != "jax":
        return
    patches.replace(keras.Variable, "__init__", _with_numbers)
    optimizer = keras.optimizers.Optimizer
    patches.replace(optimizer, "apply_gradients", _summing_pairs)
    for kind in (optimizer, keras.optimizers.LossScaleOptimizer):
        patches.replace(kind, "apply", _summing)
    for kind in ("train", "test", "predict"):
        patches.replace(keras.Model, f"make_{kind}_function", functools.partial(_making, kind))
    for name in ("fit", "evaluate", "predict"):
        patches.replace(keras.Model, name, _feeding)
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        patches.replace(keras.Model, name, _undistributed)


def strategy_of(model: keras.Model) -> Strategy | None:
    """Return the strategy in whose scope a model was created."""
    record = records.known(model)
    return None if record is None else record.strategy


def elements_of(model: keras.Model) -> DistributedDataAdapter | None:
    """Return the adapter of the distributed dataset that a model is fitted with, if any."""
    record = records.known(model)
    return None if record is None else record.elements


def require_jax() -> None:
    backend = keras.backend.backend()
    if backend != "jax":
        raise InvalidArgument(
            f"Keras runs on the backend {backend!r}, and strategies are for JAX. Set the "
            "environment variable KERAS_BACKEND to 'jax' before Keras is imported."
        )


def _remembering(new: Callable[..., Any]) -> Callable[..., object]:
    @functools.wraps(new)
    def __new__(cls: type, *args: Nest, **kwargs: Nest) -> Any:  # noqa: N807
        model = new(cls, *args, **kwargs)
        if _context.current().strategy is not None:
            require_jax()
            records.model(model).strategy = get_strategy()
            follow()  # again, in case `keras.utils.clear_session` was called in the scope
        return model

    return __new__


def _with_numbers(init: Callable[..., None]) -> Callable[..., None]:
    """Initialize variables at once when a step of a model or an optimizer creates them.

    Keras postpones or refuses that in the scope in which its variables follow our rules.
    """

    @functools.wraps(init)
    def __init__(self: keras.Variable, *args: Nest, **kwargs: Nest) -> None:  # noqa: N807
        with outside_of_functions():
            init(self, *args, **kwargs)

    return __init__


def _making(kind: str, make: Callable[..., None]) -> Callable[..., None]:
    """Replace the step functions of models that have a strategy with ours."""
    attribute = f"{kind}_function"

    @functools.wraps(make)
    def made(self: keras.Model, force: bool = False) -> None:
        strategy = strategy_of(self)
        if strategy is None:
            make(self, force)
        elif force or getattr(self, attribute) is None:
            setattr(self, attribute, getattr(_training, attribute)(self, strategy))

    return made


def _undistributed(method: Callable[..., object]) -> Callable[..., object]:
    """Keep Keras from distributing a strategy's models, and from using ours for others."""

    @functools.wraps(method)
    def undistributed(self: keras.Model, *args: object, **kwargs: object) -> object:
        with distributed_by(users_distribution() if strategy_of(self) is None else None):
            return method(self, *args, **kwargs)

    return undistributed


def _tidied(fit: Callable[..., object]) -> Callable[..., object]:
    """Let callbacks clean up a model even if `fit` fails: Keras does not notify them."""

    @functools.wraps(fit)
    def tidied(self: keras.Model, *args: object, **kwargs: object) -> object:
        try:
            return fit(self, *args, **kwargs)
        finally:
            record = records.model(self)
            waiting, record.at_the_end = record.at_the_end, []
            for put_in_order in waiting:
                put_in_order()

    return tidied


def at_the_end_of_fit(model: keras.Model, put_in_order: Callable[[], None]) -> None:
    """Register a function to call when the current `fit` of a model ends, even with an error."""
    records.model(model).at_the_end.append(put_in_order)


def _feeding(method: Callable[..., object]) -> Callable[..., object]:
    """Let `fit` and the like accept distributed datasets."""
    name = method.__name__
    signature = inspect.signature(method)
    call = _undistributed(_tidied(method) if name == "fit" else method)

    @functools.wraps(method)
    def fed(self: keras.Model, *args: object, **kwargs: object) -> object:
        strategy = strategy_of(self)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if strategy is None:
            data = given.get("x"), given.get("validation_data")
            if any(isinstance(each, DistributedDataset) for each in data):
                raise InvalidArgument(
                    f"`{name}` of {self.name!r} got a DistributedDataset, but the model was made "
                    "outside of every strategy's scope. Make it inside: `with strategy.scope():`."
                )
            return call(self, *args, **kwargs)
        if type(self).call is keras.Model.call and takes_data_alone(self, "train_step"):
            self.built = True  # there is no `call`, so Keras could not build it
        steps = given.get("steps_per_epoch" if name == "fit" else "steps")
        given["x"] = prepared(given.get("x"), strategy, name, steps)
        if isinstance(given["x"], DistributedDataAdapter):
            _require_alone(given, name)
            if not self.built:  # otherwise `predict` would use one of our batches
                self(keras.utils.unpack_x_y_sample_weight(given["x"].symbols())[0])
        validation = given.get("validation_data")
        if validation is not None and not isinstance(validation, (tuple, list)):
            given["validation_data"] = prepared(
                validation, strategy, "validation", given.get("validation_steps")
            )
        agree(strategy, name, given)
        if name == "fit":
            x = given["x"]
            records.model(self).elements = x if isinstance(x, DistributedDataAdapter) else None
        return call(*bound.args, **bound.kwargs)

    return fed


def _require_alone(given: dict[str, Any], name: str) -> None:
    """Refuse separate targets and weights: Keras would ignore them, as the dataset has its own."""
    for argument in ("y", "sample_weight", "class_weight"):
        if given.get(argument) is not None:
            raise InvalidArgument(
                f"`{name}` got a distributed dataset and `{argument}`. Have the dataset give "
                "tuples `(x, y)` or `(x, y, sample_weight)` instead."
            )


def _summing(apply: Callable[..., Nest]) -> Callable[..., object]:
    """Wrap `apply` to sum the gradients of all replicas first, in replica context."""

    @functools.wraps(apply)
    def summed(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        return _once(self, lambda sums: apply(self, sums, variables), list(grads), variables)

    return summed


def _summing_pairs(apply_gradients: Callable[..., object]) -> Callable[..., object]:
    """Wrap `apply_gradients` likewise, so that a subclass's `apply` gets sums too."""

    @functools.wraps(apply_gradients)
    def summed(self: Any, grads_and_vars: Any) -> Any:
        grads, variables = (list(each) for each in zip(*grads_and_vars, strict=True))

        def apply(sums: list[Any]) -> Any:
            return apply_gradients(self, list(zip(sums, variables, strict=True)))

        return _once(self, apply, grads, variables)

    return summed


def _once(
    optimizer: Any, apply: Callable[[list[Any]], Nest], grads: list[Any], variables: Any
) -> object:
    """Apply the gradients, in replica context after reducing them over all replicas."""
    replica = get_replica_context()
    if replica is None or _context.current().strategy is None:
        return apply(grads)

    def merged(strategy: Strategy, gradients: list[Nest], _: list[Any]) -> None:
        reduced = iter(gradients)
        if not optimizer.built and variables is not None:
            with outside_of_functions():  # inside, Keras refuses some optimizers' variables
                optimizer.build(variables)
        apply([gradient if gradient is None else next(reduced).primary for gradient in grads])

    replica.merge_gradients(
        f"apply of {optimizer.name!r}",
        merged,
        [gradient for gradient in grads if gradient is not None],
        options=CommunicationOptions(),
        subjects=(optimizer,),
        report=functools.partial(_warn, optimizer),
    )
    return optimizer.iterations


def _warn(optimizer: Any, site: Site) -> None:
    warn_once(
        optimizer,
        f"`apply` of {optimizer.name!r}",
        'To have them applied as they are, set `strategy.gradient_reduction = "NONE"`.',
        site,
    )
