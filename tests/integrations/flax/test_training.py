"""Training NNX modules on several replicas equals plain NNX on one device, with the whole batch."""

from __future__ import annotations

import functools

import optax
from flax_models import X, Y, made, over, plain_step, same, shared, step
from support import equal

import replicax as rx

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0, 9)))


@functools.cache
def trained_on_one_device(tx=None):
    ours = made(tx)
    losses = [float(plain_step(*ours, X, Y)) for _ in range(3)]
    return ours, losses


def runs_of(strategy, fn, *given):
    """Three steps of `fn`; the losses."""
    losses = []
    for batch in shared(strategy, *[(X, Y)] * 3):
        loss = strategy.run(fn, args=(*given, *batch))
        losses.append(strategy.reduce("SUM", loss, axis=None))
    return losses


@over("mirrored 2")
def test_eager_training_equals_one_device(strategy):
    expected, losses = trained_on_one_device()
    ours = made()
    equal(runs_of(strategy, step, *ours), losses, 1e-5)
    same(ours, expected)


@over("default", "one device", "mirrored 3", "mirrored 2 of 2", "central 2")
def test_compiled_training_equals_one_device(strategy):
    expected, losses = trained_on_one_device(ADAM)
    ours = made(ADAM)
    compiled = rx.function(step)
    equal(runs_of(strategy, compiled, *ours), losses, 1e-5)
    same(ours, expected)
    assert compiled.tracing_count == 1
