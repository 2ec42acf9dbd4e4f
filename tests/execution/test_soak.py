"""Ten thousand steps that nobody waits for."""

import inspect
import json
import subprocess
import sys

import pytest

PROGRAM = """
    import json, sys
    import jax.numpy as jnp, numpy as np, optax, replicax as rx

    replicas, steps = int(sys.argv[1]), int(sys.argv[2])
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        weight = rx.Variable(np.ones((8, 4), np.float32))
        seen = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        optimizer = rx.Optimizer(optax.adam(1e-3))

    def replica_step(x):
        loss, gradient = rx.value_and_grad(lambda: jnp.mean((x @ weight) ** 2), weight)()
        optimizer.apply_gradients([(gradient, weight)])
        seen.assign_add(1.0)
        return loss

    @rx.function
    def step(x):
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(x,)), axis=None)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    x = strategy.experimental_distribute_values_from_function(lambda _: np.ones((2, 8), "float32"))
    for index in range(steps):
        loss = step(x)
        if index == 1000:
            float(loss)
            early = resident()
    print(json.dumps({
        "loss": float(loss),
        "seen": float(seen),
        "traces": step.tracing_count,
        "growth": resident() / early,
    }))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
@pytest.mark.parametrize("replicas", [2, 4, 8, 16])
def test_ten_thousand_steps_end_and_take_no_more_memory(replicas):
    steps = 10_000
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(PROGRAM), str(replicas), str(steps)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["traces"] == 1
    assert report["seen"] == replicas * steps
    assert 0 <= report["loss"] < 8
    assert report["growth"] < 1.02
