"""JAX by hand: one `jit(shard_map)`, a `psum` for each gradient, parameters donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _problem import Cell, Problem, problem_of
from _protocol import serve
from _workers import Worker
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "replica"
SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)

Layers = list[tuple[jax.Array, jax.Array]]
Step = Callable[[Layers, jax.Array, jax.Array], tuple[Layers, jax.Array]]


def build(cell: Cell) -> Callable[[], float]:
    use_cpus(cell.replicas)
    train = training_of(cell)
    return lambda: float(train())


def use_cpus(count: int, worker: Worker | None = None) -> None:
    """Use as many CPU devices in this process, or one in each of as many workers."""
    jax.config.update("jax_platforms", "cpu")
    if worker is None:
        jax.config.update("jax_num_cpu_devices", count)
    else:
        jax.distributed.initialize(worker.addresses[0], len(worker.addresses), worker.index)


def training_of(cell: Cell) -> Callable[[], jax.Array]:
    """Return a training step on all devices, whichever processes they belong to."""
    problem = problem_of(cell)
    training = Training(layers_of(problem), step_of(cell), SPLIT)
    batch = training.put((np.concatenate(problem.rows), np.concatenate(problem.labels)))
    return lambda: training.train(batch)


def layers_of(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(zip(problem.weights, problem.biases, strict=True))


class Training:
    """A compiled step on all devices, and its state, such as parameters, which each call replaces.

    `split` says how the arguments of a call are divided over the replicas.
    """

    def __init__(self, state: Any, step: Callable[..., Any], split: PartitionSpec) -> None:
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        self._split = NamedSharding(mesh, split)
        self._step_of_all = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(SAME, split, split),
                out_specs=(SAME, SAME),
                check_vma=False,  # or the gradients would be summed twice
            ),
            donate_argnums=0,
        )
        self._state = jax.device_put(state, NamedSharding(mesh, SAME))

    def put(self, arrays: Any) -> Any:
        """Put rows and labels on the replicas' devices."""
        return jax.device_put(arrays, self._split)

    def train(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        self._state, loss = self._step_of_all(self._state, *batch)
        return loss


def step_of(cell: Cell) -> Step:
    """Return a training step of one replica, which sums over all of them; not compiled."""

    def loss_of(layers: Layers, rows: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = rows
        for weight, bias in layers[:-1]:
            hidden = jnp.maximum(hidden @ weight + bias, 0)
        weight, bias = layers[-1]
        logits = hidden @ weight + bias
        likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -likelihoods.sum() / cell.global_batch

    def step(layers: Layers, rows: jax.Array, labels: jax.Array) -> tuple[Layers, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(layers, rows, labels)
        gradients = jax.tree.map(lambda gradient: jax.lax.psum(gradient, AXIS), gradients)
        layers = jax.tree.map(
            lambda value, gradient: value - cell.learning_rate * gradient, layers, gradients
        )
        return layers, jax.lax.psum(loss, AXIS)

    return step


if __name__ == "__main__":
    serve(build, {"jax": jax.__version__})
