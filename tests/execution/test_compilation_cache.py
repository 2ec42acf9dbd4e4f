"""Compiled programs that are kept: nothing is compiled twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import replicax as rx

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def compilations() -> Iterator[Counter[str]]:
    """Count compilations that use the cache, and those that it had; put JAX's settings back."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    counts: Counter[str] = Counter()

    def note(event: str, **_: object) -> None:
        counts[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(note)
    yield counts
    jax.monitoring.unregister_event_listener(note)
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def train(strategy: rx.Strategy) -> float:
    with strategy.scope():
        weight = rx.Variable(np.ones((3, 2), np.float32))
        optimizer = rx.Optimizer(optax.adam(0.1))

    def step(x):
        loss, gradient = rx.value_and_grad(lambda: ((x @ weight) ** 2).sum(), weight)()
        optimizer.apply_gradients([(gradient, weight)])
        return loss

    losses = strategy.run(rx.function(step), args=(np.ones((4, 3), np.float32),))
    return float(rx.first(losses))


def test_the_programs_of_a_function_are_found_again(two, compilations, tmp_path):
    rx.config.compilation_cache(tmp_path / "new" / "cache")
    first = train(two)
    assert compilations["cache_misses"] > 0
    assert list((tmp_path / "new" / "cache").iterdir())
    compilations.clear()
    assert train(two) == first
    assert compilations["cache_hits"] == compilations["compile_requests_use_cache"] > 0
    assert compilations["cache_misses"] == 0


def test_none_keeps_nothing_from_now_on(two, compilations, tmp_path):
    rx.config.compilation_cache(tmp_path)
    rx.config.compilation_cache(None)
    train(two)
    assert compilations["cache_hits"] == compilations["cache_misses"] == 0
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_directory(compilations, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(rx.errors.InvalidArgument, match="must be a directory"):
        rx.config.compilation_cache(file)
