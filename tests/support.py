"""Comparisons of values over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import replicax as rx


def equal(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Assert that shapes and numbers are the same."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{actual} is not {expected}"
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def components_equal(strategy: rx.Strategy, value: Any, expected: Sequence[Any]) -> None:
    """Assert that each replica has one component, with its number; only this process is checked."""
    components = strategy.experimental_local_results(value)
    assert len(expected) == strategy.num_replicas_in_sync
    local = [expected[replica] for replica in strategy.topology.local_replicas]
    assert len(components) == len(local), f"{value} has not {len(local)} components"
    for component, number in zip(components, local, strict=True):
        equal(component, number)


def copies_equal(strategy: rx.Strategy, value: Any, expected: Any) -> None:
    """Assert that each local device that holds variables has a component with this number."""
    components = strategy.experimental_local_results(value)
    count = len(strategy.extended.parameter_devices)
    assert len(components) == count, f"{value} has not {count} components"
    for component in components:
        equal(component, expected)


def per_replica(strategy: rx.Strategy, values: Sequence[Any]) -> rx.PerReplica:
    """Return a value with `values[i]` on replica i."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def shares(strategy: rx.Strategy, rows: np.ndarray) -> rx.PerReplica:
    """Divide the rows of a global batch over the replicas."""
    return per_replica(strategy, np.array_split(rows, strategy.num_replicas_in_sync))
