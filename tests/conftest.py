"""Every strategy and both executions, for tests whose one body must hold for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import replicax as rx


def cpus(count: int, first: int = 0) -> list[str]:
    return [f"CPU:{index}" for index in range(first, first + count)]


def mirrored(count: int) -> Callable[[], rx.Strategy]:
    return lambda: rx.MirroredStrategy(cpus(count))


def logical(replicas: int, devices: int) -> Callable[[], rx.Strategy]:
    """Return a maker of strategies whose replicas have several logical devices."""
    return lambda: rx.MirroredStrategy(
        cpus(replicas * devices), logical_devices_per_replica=devices
    )


def in_parts(shape: tuple[int, ...], dtype: object) -> list[int]:
    """Divide every variable along its largest dimension, however small it is."""
    largest = max(shape, default=0)
    return [2 if axis == shape.index(largest) else 1 for axis in range(len(shape))]


def fully_sharded(replicas: int, devices: int = 1) -> Callable[[], rx.Strategy]:
    return lambda: rx.FullyShardedStrategy(
        cpus(replicas * devices),
        variable_partitioner=in_parts,
        logical_devices_per_replica=devices,
    )


def central(count: int, parameter_device: str) -> Callable[[], rx.Strategy]:
    return lambda: rx.experimental.CentralStorageStrategy(cpus(count), parameter_device)


STRATEGIES: dict[str, Callable[[], rx.Strategy]] = {
    "default": rx.get_strategy,
    "one device": lambda: rx.OneDeviceStrategy("CPU:1"),
    "mirrored 1": mirrored(1),
    "mirrored 2": mirrored(2),
    "mirrored 3": mirrored(3),
    "mirrored 8": mirrored(8),
    "mirrored 2 of 2": logical(2, 2),
    "fully sharded 2": fully_sharded(2),
    "fully sharded 2 of 2": fully_sharded(2, 2),
    "central 1": central(1, "CPU:0"),
    "central 2": central(2, "CPU:0"),
    "central 3, apart": central(3, "CPU:7"),
}

if "TF_CONFIG" in os.environ:
    # This is one of several workers that run the same tests in step; see tests/multiprocess.
    _workers = (
        rx.MultiWorkerFullyShardedStrategy(variable_partitioner=in_parts)
        if os.environ.get("STATE") == "sharded"
        else rx.MultiWorkerMirroredStrategy(
            logical_devices_per_replica=int(os.environ.get("LOGICAL_DEVICES", "1"))
        )
    )
    STRATEGIES = {"workers": lambda: _workers}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the tests that hold for every strategy, if there are several workers."""
    if "TF_CONFIG" in os.environ:
        items[:] = [
            item
            for item in items
            if "strategy" in getattr(item, "fixturenames", ())
            and item.get_closest_marker("one_process") is None
        ]


# `STRATEGIES="default,mirrored 2" make test` is over these only.
CHOSEN = STRATEGIES
if "STRATEGIES" in os.environ and "TF_CONFIG" not in os.environ:
    CHOSEN = os.environ["STRATEGIES"].split(",")

# For pyright alone, in `test_typed_idioms.py`.
collect_ignore = ["typed_idioms.py"]

# These take long, or show the same as others: `make test` leaves them to `make test-all`.
SLOW_STRATEGIES = (
    "mirrored 1",
    "mirrored 3",
    "mirrored 8",
    "fully sharded 2 of 2",
    "central 1",
    "central 3, apart",
)


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_STRATEGIES else ())
        for name in CHOSEN
    ]
)
def strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    return STRATEGIES[request.param]()


@pytest.fixture(params=[x for x in ("mirrored 1", "mirrored 2", "workers") if x in STRATEGIES])
def mirrored_strategy(request: pytest.FixtureRequest) -> rx.Strategy:
    """Return a strategy of one or two mirrored replicas, or that of all workers."""
    return STRATEGIES[request.param]()


@pytest.fixture(params=["eager", "compiled"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test twice: as it is, and with every function given to `run` an `rx.function`."""
    if request.param == "compiled":
        run, within = rx.Strategy.run, []
        functions: dict[Callable, Callable] = {}  # a function that is run again is compiled once

        def run_compiled(self, fn, args=(), kwargs=None, options=None):
            if within or not callable(fn):
                return run(self, fn, args, kwargs, options)
            within.append(fn)
            try:
                compiled = functions.setdefault(fn, rx.function(fn))
                return run(self, compiled, args, kwargs, options)
            finally:
                within.pop()

        monkeypatch.setattr(rx.Strategy, "run", run_compiled)
    return request.param


@pytest.fixture
def two() -> rx.Strategy:
    """Return two mirrored replicas: the smallest case in which anything must be kept in sync."""
    return rx.MirroredStrategy(cpus(2))
