"""A small training program with a bit of everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH = 12, 4


class Training:
    """Two variables, an optimizer, a count of the rows seen, an iterator, a number.

    Args:
      strategy: Any strategy.
      optimizer: Makes a transformation from a learning rate.
      seed: A number that is added to the initial values of variables.
      compiled: Whether the step is an `rx.function`.
    """

    def __init__(
        self,
        strategy: rx.Strategy,
        optimizer: Callable[[float], Any] = optax.adam,
        *,
        seed: float = 0.0,
        compiled: bool = False,
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weight = rx.Variable(np.float32([1.0, 2.0, 3.0]) + np.float32(seed), name="weight")
            self.bias = rx.Variable(np.float32(seed), name="bias")
            self.seen = rx.Variable(
                np.zeros(ROWS, np.int32), synchronization="ON_READ", aggregation="SUM"
            )
            self.optimizer = rx.Optimizer(optimizer(0.1))
        rows = np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2) / 10
        pipeline = rx.from_tensor_slices((np.arange(ROWS), rows)).shuffle(seed=1)
        self.iterator = iter(
            strategy.experimental_distribute_dataset(
                pipeline.batch(BATCH).repeat(5), rx.InputOptions(auto_shard_policy="DATA")
            )
        )
        self.checkpoint = rx.Checkpoint(
            nest={"weight": self.weight, "others": [self.bias, (self.seen,)]},
            optimizer=self.optimizer,
            data=self.iterator,
            steps=0,
        )

        def step(batch: Any) -> None:
            strategy.run(self._replica_step, args=batch)

        self._step = rx.function(step) if compiled else step

    def _replica_step(self, numbers: Any, rows: Any) -> None:
        def loss() -> Any:
            errors = rows @ self.weight[:2] + self.bias * self.weight[2] - 1.0
            return jnp.sum(errors**2) / BATCH

        trained = [self.weight, self.bias]
        gradients = rx.grad(loss, trained)()
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        self.seen.assign_add(jnp.zeros(ROWS, jnp.int32).at[numbers].add(1))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step(next(self.iterator))
            self.checkpoint.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight.numpy().tolist(),
            "bias": self.bias.numpy().tolist(),
            "seen": self.seen.numpy().tolist(),
            "steps": self.checkpoint.steps,
            "iterations": int(self.optimizer.iterations),
            "data": self.iterator.get_state()["steps"],
        }
