"""A debugging check that the copies of mirrored variables are still equal after a step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context, cluster
from replicax._settings import settings
from replicax.errors import CopiesDiffer
from replicax.values import Mirrored
from replicax.variables._state import state_of
from replicax.variables._variable import Variable, storage_of


def check_mirrored(flag: bool) -> None:
    """Compare the copies of variables after each step that writes them (True), or stop (False).

    Copies that differ raise `rx.errors.CopiesDiffer`. They come from functions given to
    `extended.update` that get per-replica values or do different things on different devices, and
    from gradients that differ but are applied with `skip_gradients_aggregation=True`. Copies are
    compared bit for bit on the host, so this is for debugging.
    """
    settings.check_mirrored = bool(flag)


def require_equal_copies(variables: Iterable[Variable], label: str) -> None:
    """Refuse copies that differ, if the check is on; `label` names the write."""
    if not settings.check_mirrored or _context.current().program is not None:
        return
    for variable in variables:
        state = storage_of(variable).seen(state_of(variable))
        if isinstance(state, Mirrored):
            _require_equal(variable, state, label)


def _require_equal(variable: Variable, state: Mirrored, label: str) -> None:
    topology = state.topology
    assert topology is not None
    copies = [_numbers(copy) for copy in state.values]
    sums = [zlib.crc32(copy.tobytes()) for copy in copies]
    if topology.spans_processes:
        everyones = cluster.current().all_gather(f"comparing copies of {variable.name!r}", sums)
        sums = [number for theirs in everyones for number in theirs]
    others = [replica for replica, number in enumerate(sums) if number != sums[0]]
    if not others:
        return
    largest = max(_largest_difference(copies[0], copy) for copy in copies)
    raise CopiesDiffer(
        f"After {label}, the copies of variable {variable.name!r} on replicas "
        f"{', '.join(map(str, others))} are not that of replica 0"
        f"{f'; the largest difference on this worker is {largest:.3g}' if largest else ''}. Give "
        "`extended.update`, or `apply_gradients` with `skip_gradients_aggregation=True`, values "
        "that are the same on all replicas: the result of an `all_reduce`."
    )


def _numbers(copy: Any) -> np.ndarray:
    keys = jnp.issubdtype(copy.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(copy) if keys else copy)


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.max(np.abs(one.astype(wide) - other.astype(wide)), initial=0.0))
