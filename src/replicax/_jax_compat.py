"""The one place that touches private parts of JAX. Tested with JAX 0.10.2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jax._src import config as _config


def thread_configuration() -> Callable[[], AbstractContextManager[None]]:
    """Captures what this thread set by JAX context managers, for another thread to enter.

    Why: `jax.default_matmul_precision("highest")`, `jax.enable_x64()`, `jax.disable_jit()` and
    their like are thread-local. A replica that runs on a thread of ours has to compute under the
    settings of the thread that called `run`, and JAX has no public way to carry them over.
    """
    unset = _config.config_ext.unset
    captured: list[tuple[Any, Any]] = [
        (state, value)
        for state in _config.config_states.values()
        if (value := state.get_local()) is not unset
    ]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state, value in captured:
                stack.enter_context(state(value))
            yield

    return entered


def derivative_rules(parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The user's rules behind a `custom_jvp_call` or `custom_vjp_call` in a jaxpr, if they show.

    Why: two traces of one function have equal jaxprs but for these parameters, which are new
    objects each time. To tell that the traces mean the same, one has to compare the rules
    themselves, and JAX keeps them inside closures. None when JAX keeps them elsewhere.
    """
    try:
        if "jvp_jaxpr_fun" in parameters:
            rules = [_wrapped_rule(parameters["jvp_jaxpr_fun"], "jvp")]
        else:
            rules = [_wrapped_rule(parameters["fwd_jaxpr_thunk"], "fwd"), parameters["bwd"]]
        # One transformation flattens the arguments; further ones hold static arguments
        # (`nondiff_argnums`), which are part of what the rule computes.
        if any(len(rule.transforms) != 1 for rule in rules):
            return None
        return tuple(rule.f for rule in rules)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _wrapped_rule(thunk: Any, name: str) -> Any:
    return _captured(_captured(thunk.f, "fn"), name)


def _captured(function: Any, name: str) -> Any:
    """What `function` has in its closure under `name`."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
