"""Replicas of several logical devices on several workers."""

from __future__ import annotations

import inspect

from workers import run

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, replicax as rx
strategy = rx.MultiWorkerMirroredStrategy(logical_devices_per_replica=2)
assert strategy.num_replicas_in_sync == 2
start = np.arange(32, dtype=np.float32).reshape(8, 4)
for parts, shard in (([2, 1], (4, 4)), ([1, 2], (8, 2))):
    for compiled in (False, True):
        with strategy.scope():
            with strategy.extended.partition(parts):
                weight = rx.Variable(lambda: jnp.asarray(start))
            optimizer = rx.Optimizer(optax.sgd(0.25, momentum=0.0))

        def step():
            gradient = rx.grad(lambda: (weight.value**2).sum() / 2, weight)()
            optimizer.apply_gradients([(gradient, weight)])

        function = rx.function(step) if compiled else step
        for _ in range(2):
            strategy.run(function)
        # Each replica's gradient is the weight itself, so a step halves it.
        np.testing.assert_allclose(weight.numpy(), start / 4)
        weight.assign_add(start)
        weight.assign(weight.value * 4)
        np.testing.assert_allclose(weight.numpy(), start * 5)
        assert weight.value.sharding.shard_shape(weight.shape) == shard
        slots = [v for v in optimizer.variables if v.shape == weight.shape]
        assert slots
        assert all(v.value.sharding.shard_shape(v.shape) == shard for v in slots)
print("ALL HELD")
"""


def test_variables_in_parts_are_trained_by_two_workers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(inspect.cleandoc(PROGRAM))
    for each in run([str(program)], 120, workers=2, devices=2):
        assert each.code == 0, each.output[-5000:]
        assert "ALL HELD" in each.output
