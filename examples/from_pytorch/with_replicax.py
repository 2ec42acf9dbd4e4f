"""The same by replicax.

replicax launch --workers 2 --devices-per-worker 1 examples/from_pytorch/with_replicax.py
"""

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()

random = np.random.default_rng(0)
x = random.normal(size=(100, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32)

with strategy.scope():
    weights = rx.Variable(np.zeros(3, np.float32), name="weights")
    optimizer = rx.Optimizer(optax.sgd(0.1), reduction="MEAN")  # over the replicas, as DDP does
loader = rx.from_tensor_slices((x, y)).batch(20)  # of all replicas together
by_rows = rx.InputOptions(auto_shard_policy="DATA")
distributed = strategy.experimental_distribute_dataset(loader, by_rows)


def replica_step(features, targets):
    def loss_fn():
        return jnp.mean((features @ weights - targets) ** 2)

    gradient = rx.grad(loss_fn, weights)()
    optimizer.apply_gradients([(gradient, weights)])  # averaged first


@rx.function
def train_step(batch):
    strategy.run(replica_step, args=batch)


for _ in range(3):
    for batch in distributed:  # 10 rows for each replica
        train_step(batch)

rx.print("weights", weights.numpy().tolist())
