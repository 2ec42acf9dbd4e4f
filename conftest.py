"""For every test and doctest: eight virtual CPU devices, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Where libtpu is installed, every process would look for a TPU first, and lock the others out.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before anybody imports Keras, which TensorFlow does by itself.
os.environ["KERAS_BACKEND"] = "jax"

import jax

import replicax as rx
from replicax import _context


def _own_directory(parent: Path) -> Path:
    """Return a directory in which no other process writes, with what earlier ones have written.

    Half of the time of the tests goes into compiling programs that others have compiled before. But
    JAX writes files that a process beside this one could read before they are complete.
    """
    for number in itertools.count():
        directory = parent / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)  # until this process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return directory
    raise AssertionError


if "TF_CONFIG" not in os.environ:  # workers get their devices from whoever starts them
    rx.config.set_logical_cpu_devices(8)
    _compiled = _own_directory(Path(__file__).parent / ".jax_cache")
    jax.config.update("jax_compilation_cache_dir", str(_compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The first example of a shape compiles a program; how long that takes says nothing.
hypothesis.settings.register_profile("replicax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("replicax")


# Set by libraries when they are first imported: TensorFlow, scikit-learn, tensorboardX, and what
# Keras imports.
_SET_BY_IMPORTS = {
    "CRC32C_SW_MODE",
    "CUDA_ROOT",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "RAY_CLIENT_MODE",
    "TF2_BEHAVIOR",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
}


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> None:
    """Leave what earlier modules keep alive, above all programs, out of garbage collections.

    Collecting takes seconds at the end of a long run, and the fixture below collects after tests
    whose threads end with their objects.
    """
    gc.collect()
    gc.freeze()


def _environment() -> dict[str, str]:
    ignored = {"PYTEST_CURRENT_TEST", *_SET_BY_IMPORTS}
    return {name: value for name, value in os.environ.items() if name not in ignored}


def _children() -> set[str]:
    """Return the ids of this process's child processes, where the system tells."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # that thread has just ended
            found |= set(file.read_text().split())
    return found


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """Fails a test that leaves a context, an environment variable, a thread or a process behind."""
    frame = _context.current()
    environment = _environment()
    threads, children = set(threading.enumerate()), _children()
    yield
    assert _context.current() is frame, f"left inside the {_context.current()}"
    assert _environment() == environment, "the environment was changed"
    left = set(threading.enumerate()) - threads
    if left:
        gc.collect()  # an iterator in a cycle ends its thread when the cycle goes
    for thread in left:
        thread.join(5)  # those that were told to end may need a moment
    assert not any(thread.is_alive() for thread in left), f"left behind: {left}"
    assert _children() <= children, "a process was left behind"
