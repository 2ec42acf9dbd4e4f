"""A short training of one variable that is divided by rows, with everything that is saved of it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

SHAPE = (6, 5)  # 4 replicas have 2, 2, 2 and 0 rows: one has nothing but padding


by_rows = rx.experimental.partitioners.FixedShardsPartitioner(2)


def make(strategy):
    with strategy.scope():
        weight = rx.Variable(np.zeros(SHAPE, np.float32), name="weight")
        optimizer = rx.Optimizer(optax.adam(0.1))
    return rx.Checkpoint(weight=weight, optimizer=optimizer, scale=rx.Variable(1.0))


def trained(strategy, checkpoint=None, steps=2):
    checkpoint = make(strategy) if checkpoint is None else checkpoint

    @rx.function
    def step():
        def replica():
            target = jnp.arange(30.0).reshape(SHAPE)
            gradient = (checkpoint.weight - target) / strategy.num_replicas_in_sync
            checkpoint.optimizer.apply_gradients([(gradient, checkpoint.weight)])

        strategy.run(replica)

    for _ in range(steps):
        step()
    return checkpoint


def numbers(checkpoint):
    return [checkpoint.weight.numpy().tolist()] + [
        variable.numpy().tolist() for variable in checkpoint.optimizer.variables
    ]
