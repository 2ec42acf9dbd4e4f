"""Advice on alternatives, for errors whose message is JAX's or Python's own."""

from __future__ import annotations

import jax
from jax.errors import TracerIntegerConversionError

from replicax.topology import REPLICA_AXIS
from replicax.values import DistributedValues


def add_recipe(error: BaseException) -> None:
    """Add a note to an error that a user's function has raised, if it is a known one."""
    for recipe in _RECIPES:
        note = recipe(error)
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the class is the user's, and its error must not hide this one
        return ""


def _assigned_element(error: BaseException) -> str | None:
    if not isinstance(error, AttributeError) or not isinstance(error.obj, jax.Array):
        return None
    if error.name not in ("assign", "assign_add", "assign_sub"):
        return None
    how = {"assign": "set", "assign_add": "add", "assign_sub": "subtract"}[error.name]
    return (
        "An element of a variable is an array, which cannot be assigned to. In place of "
        f"`variable[index].{error.name}(value)` write "
        f"`variable.assign(variable.value.at[index].{how}(value))`."
    )


def _left_control_flow(error: BaseException) -> str | None:
    if not isinstance(error, TypeError):
        return None
    text = _text(error)
    if "returned a value of type" not in text or f"'{DistributedValues.__module__}." not in text:
        return None
    return (
        "A distributed value cannot leave `lax.scan`, `fori_loop`, `while_loop` or `cond`, which "
        "carry arrays. Put the loop inside `run`."
    )


def _other_device(error: BaseException) -> str | None:
    if "incompatible devices" not in _text(error):  # JAX does not say where the array came from
        return None
    return (
        "An array that the function closes over is on another replica's device. Pass it in `args` "
        "of `run`, which brings it to every replica; compiled functions (`rx.function`) need not. "
        "To put the components of a distributed value together, use `strategy.gather`."
    )


def _array_for_integer(error: BaseException) -> str | None:
    if not isinstance(error, TracerIntegerConversionError):
        return None
    return (
        "An array has no number while a function is traced, and `range`, a list or a slice needs "
        "one. Give the function a Python number: `fn(iterator, int(count))`. A loop of steps is "
        "compiled once, and serves any count. Inside `run`, use "
        "`jax.lax.fori_loop`."
    )


def _unnamed_axis(error: BaseException) -> str | None:
    if not isinstance(error, NameError) or f"axis name: {REPLICA_AXIS}" not in _text(error):
        return None
    return (
        f"JAX's collectives, and layers that use them, such as "
        f"`nnx.BatchNorm(axis_name={REPLICA_AXIS!r})`, find the replicas by the name "
        f"{REPLICA_AXIS!r} in compiled functions only. Make the function an `rx.function`, or call "
        '`rx.get_replica_context().all_reduce("MEAN", value)`, which works in both.'
    )


_RECIPES = (
    _assigned_element,
    _left_control_flow,
    _other_device,
    _array_for_integer,
    _unnamed_axis,
)
