"""The private parts of NNX that we need. Tested with Flax 0.12.8.

An NNX object belongs to the JAX trace that created it, and refuses to be changed in another one.
The pickle protocol (`__getstate__`, `__setstate__`) is public and bypasses this check; the names in
the states are private.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

State = dict[str, Any]

# Internal attributes of NNX modules, which NNX may replace at any time.
NOT_THE_USERS = frozenset({"_pytree__state", "_pytree__nodes"})


def current_trace() -> object:
    """Return the object that represents the current trace in the state of a variable."""
    return nnx.Variable(None).__getstate__()["_trace_state"]


def variable_state(state: State, value: object, trace: object) -> State:
    """Return the state of a variable with another value, as if created in `trace`."""
    metadata = dict(state["_var_metadata"])
    return {"_raw_value": value, "_trace_state": trace, "_var_metadata": metadata}


def node_state(state: State) -> State:
    """Return the state of a module or another node, as if created in the current trace."""
    return {**state, "_pytree__state": jax.tree.map(lambda x: x, state["_pytree__state"])}


def raw_value(state: State) -> object:
    """Return the value in the state of a variable."""
    return state["_raw_value"]


def set_raw_value(variable: nnx.Variable, value: object) -> None:
    """Replace the value, even during tracing."""
    variable.__setstate__({**variable.__getstate__(), "_raw_value": value})


def set_node_state(node: nnx.Pytree, state: State) -> None:
    """Replace all attributes; `__setstate__` alone would keep those added since."""
    vars(node).clear()
    node.__setstate__(state)
