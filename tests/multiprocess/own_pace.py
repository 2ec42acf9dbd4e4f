"""Workers call a function that does not communicate equally often, worker 1 at a slower pace."""

from __future__ import annotations

import time

import numpy as np

import replicax as rx

if __name__ == "__main__":
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = rx.Variable(np.ones(3, np.float32), name="weight")

    @rx.function
    def step():
        return strategy.run(lambda: (weight * weight).sum())

    for _ in range(4):
        (result,) = strategy.experimental_local_results(step())
        time.sleep(0.5 * strategy.cluster_resolver.task_id)
    print(f"result {float(result)}", flush=True)
