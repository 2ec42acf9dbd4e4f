"""JAX by hand: one `jit(shard_map)`, a `psum` for each gradient, parameters donated."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _problem import LEARNING_RATE, Cell, problem_of
from _protocol import serve
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "replica"
SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)

Layers = list[tuple[jax.Array, jax.Array]]


def build(cell: Cell) -> Callable[[], float]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cell.replicas)
    train = training_of(cell)
    return lambda: float(train())


def training_of(cell: Cell) -> Callable[[], jax.Array]:
    """A training step on all devices, whichever processes they belong to."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    problem = problem_of(cell)

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
            lambda value, gradient: value - LEARNING_RATE * gradient, layers, gradients
        )
        return layers, jax.lax.psum(loss, AXIS)

    step_of_all = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(SAME, SPLIT, SPLIT),
            out_specs=(SAME, SAME),
            check_vma=False,  # or the gradients would be summed twice
        ),
        donate_argnums=0,
    )
    layers = jax.device_put(
        list(zip(problem.weights, problem.biases, strict=True)), NamedSharding(mesh, SAME)
    )
    rows, labels = jax.device_put(
        (np.concatenate(problem.rows), np.concatenate(problem.labels)), NamedSharding(mesh, SPLIT)
    )

    def train() -> jax.Array:
        nonlocal layers
        layers, loss = step_of_all(layers, rows, labels)
        return loss

    return train


if __name__ == "__main__":
    serve(build, {"jax": jax.__version__})
