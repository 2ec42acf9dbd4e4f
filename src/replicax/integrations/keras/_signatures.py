"""The two signatures that a step of a model may have."""

from __future__ import annotations

import inspect

import keras

from replicax.errors import InvalidArgument


def takes_data_alone(model: keras.Model, name: str) -> bool:
    """Return whether a step is `step(self, data)`, as with TensorFlow's backend.

    The other signature, which Keras uses on JAX, is `step(self, state, data)`.
    """
    signature = inspect.signature(getattr(model, name))
    for arguments in (("state", "data"), ("data",)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 1
    raise InvalidArgument(
        f"`{name}` of {model.name!r} has the wrong signature. Received: `{name}{signature}`, "
        f"besides `self`. Write `{name}(self, data)`, which changes the model's variables, or "
        f"`{name}(self, state, data)`, which returns the new state as well."
    )
