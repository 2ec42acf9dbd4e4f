"""Where Keras is told of us: a few methods of its classes are wrapped.

Keras tells nobody when a model is made, nor which model a `Distribution` is asked for, and an
optimizer has no place to combine gradients. What is wrapped are methods that Keras documents; for
models and optimizers without a strategy, they do what they did.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

from replicax import _context
from replicax._enums import ReduceOp
from replicax.collectives import CommunicationOptions
from replicax.errors import InvalidArgument
from replicax.input import DistributedDataset
from replicax.integrations.keras import _training
from replicax.integrations.keras._input import Elements, agree, prepared
from replicax.strategies import Strategy, get_replica_context, get_strategy

_elements: weakref.WeakKeyDictionary[keras.Model, Elements] = weakref.WeakKeyDictionary()
_models: weakref.WeakKeyDictionary[keras.Model, Strategy] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wraps Keras' methods."""
    keras.Model.__new__ = _remembering(keras.Model.__new__)
    if keras.backend.backend() != "jax":
        return
    keras.optimizers.Optimizer.apply = _summing(keras.optimizers.Optimizer.apply)
    for kind in ("train", "test", "predict"):
        name = f"make_{kind}_function"
        setattr(keras.Model, name, _making(kind, getattr(keras.Model, name)))
    for name in ("fit", "evaluate", "predict"):
        setattr(keras.Model, name, _feeding(getattr(keras.Model, name)))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        setattr(keras.Model, name, _undistributed(getattr(keras.Model, name)))


def strategy_of(model: keras.Model) -> Strategy | None:
    """The strategy in whose scope a model was made."""
    return _models.get(model)


def elements_of(model: keras.Model) -> Elements | None:
    """What a model is fitted with, if that is a distributed dataset."""
    return _elements.get(model)


def require_jax() -> None:
    backend = keras.backend.backend()
    if backend != "jax":
        raise InvalidArgument(
            f"Keras runs on the backend {backend!r}, and strategies are for JAX. Set the "
            "environment variable KERAS_BACKEND to 'jax' before Keras is imported."
        )


def _remembering(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        model = new(cls, *args, **kwargs)
        if _context.current().strategy is not None:
            require_jax()
            _models[model] = get_strategy()
        return model

    return __new__


def _making(kind: str, make: Callable[..., None]) -> Callable[..., None]:
    """The step functions of models with a strategy are ours."""
    attribute = f"{kind}_function"

    @functools.wraps(make)
    def made(self: keras.Model, force: bool = False) -> None:
        strategy = strategy_of(self)
        if strategy is None:
            make(self, force)
        elif force or getattr(self, attribute) is None:
            setattr(self, attribute, getattr(_training, attribute)(self, strategy))

    return made


def _undistributed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Keras from distributing by itself, should it be called in a scope."""

    @functools.wraps(method)
    def undistributed(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if strategy_of(self) is None:
            return method(self, *args, **kwargs)
        before = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            return method(self, *args, **kwargs)
        finally:
            keras.distribution.set_distribution(before)

    return undistributed


def _feeding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `fit` and its like take what a strategy distributes."""
    name = method.__name__
    signature = inspect.signature(method)
    call = _undistributed(method)

    @functools.wraps(method)
    def fed(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if strategy is None:
            if isinstance(given.get("x"), DistributedDataset):
                raise InvalidArgument(
                    f"`{name}` of {self.name!r} got a DistributedDataset, but the model was made "
                    "outside of every strategy's scope. Make it inside: `with strategy.scope():`."
                )
            return method(self, *args, **kwargs)
        steps = given.get("steps_per_epoch" if name == "fit" else "steps")
        given["x"] = prepared(given.get("x"), strategy, name, steps)
        if isinstance(given["x"], Elements):
            _require_alone(given, name)
        validation = given.get("validation_data")
        if validation is not None and not isinstance(validation, (tuple, list)):
            given["validation_data"] = prepared(
                validation, strategy, "validation_data", given.get("validation_steps")
            )
        agree(strategy, name, given)
        if name == "fit":
            _elements.pop(self, None)
            if isinstance(given["x"], Elements):
                _elements[self] = given["x"]
        return call(*bound.args, **bound.kwargs)

    return fed


def _require_alone(given: dict[str, Any], name: str) -> None:
    """Targets and weights are part of a dataset's elements; Keras would not look at these."""
    for argument in ("y", "sample_weight", "class_weight"):
        if given.get(argument) is not None:
            raise InvalidArgument(
                f"`{name}` got a distributed dataset and `{argument}`. Have the dataset give "
                "tuples `(x, y)` or `(x, y, sample_weight)` instead."
            )


def _summing(apply: Callable[..., Any]) -> Callable[..., Any]:
    """In replica context the replicas meet, and their gradients are summed first."""

    @functools.wraps(apply)
    def summed(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = get_replica_context()
        if replica is None or _context.current().strategy is None:
            return apply(self, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        present = [gradient for gradient in grads if gradient is not None]

        def merged(strategy: Strategy, *gradients: Any) -> None:
            sums = iter(
                strategy.collectives.reduce(ReduceOp.SUM, gradients, CommunicationOptions())
            )
            apply(self, [g if g is None else next(sums).primary for g in grads], variables)

        return replica.merge(f"apply of {self.name!r}", merged, present, subjects=(self,))

    return summed
