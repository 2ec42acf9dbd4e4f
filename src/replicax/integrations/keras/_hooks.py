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
from replicax.collectives import CommunicationOptions
from replicax.errors import InvalidArgument
from replicax.execution import Site, warn_once
from replicax.input import DistributedDataset
from replicax.integrations.keras import _training
from replicax.integrations.keras._input import Elements, agree, prepared
from replicax.integrations.keras._scope import (
    distributed_by,
    follow,
    outside_of_functions,
    users_distribution,
)
from replicax.integrations.keras._signatures import takes_data_alone
from replicax.strategies import Strategy, get_replica_context, get_strategy

_at_the_end: weakref.WeakKeyDictionary[keras.Model, list[Callable[[], None]]]
_at_the_end = weakref.WeakKeyDictionary()
_elements: weakref.WeakKeyDictionary[keras.Model, Elements] = weakref.WeakKeyDictionary()
_models: weakref.WeakKeyDictionary[keras.Model, Strategy] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wraps Keras' methods."""
    keras.Model.__new__ = _remembering(keras.Model.__new__)
    if keras.backend.backend() != "jax":
        return
    keras.Variable.__init__ = _with_numbers(keras.Variable.__init__)
    optimizer = keras.optimizers.Optimizer
    optimizer.apply_gradients = _summing_pairs(optimizer.apply_gradients)
    for kind in (optimizer, keras.optimizers.LossScaleOptimizer):
        kind.apply = _summing(kind.apply)
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
            follow()  # again, in case that `keras.utils.clear_session` was called in the scope
        return model

    return __new__


def _with_numbers(init: Callable[..., None]) -> Callable[..., None]:
    """Have variables made in a step, of a model or an optimizer, begin with numbers at once.

    Keras puts that off, or refuses it, in the scope in which its variables follow our rules.
    """

    @functools.wraps(init)
    def __init__(self: keras.Variable, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        with outside_of_functions():
            init(self, *args, **kwargs)

    return __init__


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
    """Keeps Keras from distributing models of a strategy, and others by what we have set."""

    @functools.wraps(method)
    def undistributed(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with distributed_by(users_distribution() if strategy_of(self) is None else None):
            return method(self, *args, **kwargs)

    return undistributed


def _tidied(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Has callbacks put a model in order when `fit` fails: Keras does not tell them."""

    @functools.wraps(fit)
    def tidied(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        try:
            return fit(self, *args, **kwargs)
        finally:
            for put_in_order in _at_the_end.pop(self, ()):
                put_in_order()

    return tidied


def at_the_end_of_fit(model: keras.Model, put_in_order: Callable[[], None]) -> None:
    """Has something called when the current `fit` of a model ends, however it does."""
    _at_the_end.setdefault(model, []).append(put_in_order)


def _feeding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `fit` and its like take what a strategy distributes."""
    name = method.__name__
    signature = inspect.signature(method)
    call = _undistributed(_tidied(method) if name == "fit" else method)

    @functools.wraps(method)
    def fed(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
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
            self.built = True  # there is nothing to call, so that Keras could not build it
        steps = given.get("steps_per_epoch" if name == "fit" else "steps")
        given["x"] = prepared(given.get("x"), strategy, name, steps)
        if isinstance(given["x"], Elements):
            _require_alone(given, name)
            if not self.built:  # for which `predict` would use a batch as it comes
                self(keras.utils.unpack_x_y_sample_weight(given["x"].symbols())[0])
        validation = given.get("validation_data")
        if validation is not None and not isinstance(validation, (tuple, list)):
            given["validation_data"] = prepared(
                validation, strategy, "validation", given.get("validation_steps")
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
        variables = None if trainable_variables is None else list(trainable_variables)
        return _once(self, lambda sums: apply(self, sums, variables), list(grads), variables)

    return summed


def _summing_pairs(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The same for `apply_gradients`, so that an `apply` of a subclass gets sums too."""

    @functools.wraps(apply_gradients)
    def summed(self: Any, grads_and_vars: Any) -> Any:
        grads, variables = (list(each) for each in zip(*grads_and_vars, strict=True))

        def apply(sums: list[Any]) -> Any:
            return apply_gradients(self, list(zip(sums, variables, strict=True)))

        return _once(self, apply, grads, variables)

    return summed


def _once(
    optimizer: Any, apply: Callable[[list[Any]], Any], grads: list[Any], variables: Any
) -> Any:
    """Applies gradients where all replicas meet; elsewhere, as they are."""
    replica = get_replica_context()
    if replica is None or _context.current().strategy is None:
        return apply(grads)

    def merged(strategy: Strategy, gradients: list[Any], _: list[Any]) -> None:
        reduced = iter(gradients)
        if not optimizer.built and variables is not None:
            with outside_of_functions():  # some make variables that Keras refuses inside
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
