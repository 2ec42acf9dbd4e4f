"""Two steps of a training by all workers; each prints how many compilations a cache could serve."""

from __future__ import annotations

import json
from collections import Counter

import jax
import numpy as np
import optax

import replicax as rx

counts: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))

strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = rx.Variable(np.ones((3, 2), np.float32))
    optimizer = rx.Optimizer(optax.adam(0.1))


def step(x):
    loss, gradient = rx.value_and_grad(lambda: ((x @ weight) ** 2).sum(), weight)()
    optimizer.apply_gradients([(gradient, weight)])
    return loss


train_step = rx.function(lambda x: strategy.reduce("SUM", strategy.run(step, (x,)), axis=None))
rows = np.ones((4, 3), np.float32)
losses = [float(train_step(rows)) for _ in range(2)]
asked, found = counts["compile_requests_use_cache"], counts["cache_hits"]
print(json.dumps({"losses": losses, "compiled": asked - found, "found": found}))
