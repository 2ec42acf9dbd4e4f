"""The first step of a training with many variables, by replicax or by hand in JAX.

Both have the same network and the same Optax update; by hand it is one `jit(shard_map)`. Run as
`first_step.py '{"form": "replicax", "variables": 100, "optimizer": "adam", "workers": 1}'`, it
prints one line of JSON; `benchmarks/first_step.py` asks. One process has two replicas, and each of
several workers has one; worker 0 starts the others and measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _protocol import with_python
from _replicax import TRAINING_VERSIONS, strategy_of
from _workers import Worker, answer_question
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_shard_map import use_cpus

import replicax as rx

REPLICAS = 2
WIDTH = 16
ROWS = 32
AXIS = "replica"
OPTIMIZERS = {"sgd": optax.sgd, "adam": optax.adam}
RATE = 1e-3

Params = list[tuple[Any, Any]]
Call = Callable[[], jax.Array]  # a step, which returns the loss


def params_of(variables: int) -> Params:
    random = np.random.default_rng(0)
    return [
        (
            random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5,
            np.zeros(WIDTH, np.float32),
        )
        for _ in range(variables // 2)
    ]


def rows_of(replica: int) -> np.ndarray:
    return np.random.default_rng(1 + replica).normal(size=(ROWS, WIDTH)).astype(np.float32)


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    hidden = rows
    for weight, bias in params:
        hidden = jnp.tanh(hidden @ weight + bias)
    return jnp.mean((hidden - rows) ** 2) / REPLICAS


def replicax_form(variables: int, optimizer: str, worker: Worker | None) -> Call:
    strategy = strategy_of(REPLICAS, worker)
    with strategy.scope():
        params = rx.make_variables(params_of(variables))
        tx = rx.Optimizer(OPTIMIZERS[optimizer](RATE))
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: rows_of(context.replica_id_in_sync_group)
    )

    def step(rows: jax.Array) -> jax.Array:
        loss, gradients = rx.value_and_grad(lambda: loss_of(params, rows), params)()
        tx.apply_gradients(gradients, params)
        return loss

    @rx.function
    def train_step(rows: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)

    return lambda: train_step(rows)


def jax_form(variables: int, optimizer: str, worker: Worker | None) -> Call:
    use_cpus(REPLICAS, worker)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    same, split = PartitionSpec(), PartitionSpec(AXIS)
    tx = OPTIMIZERS[optimizer](RATE)
    params = params_of(variables)
    state = jax.device_put((params, tx.init(params)), NamedSharding(mesh, same))
    rows = jax.device_put(
        np.concatenate([rows_of(replica) for replica in range(REPLICAS)]),
        NamedSharding(mesh, split),
    )

    def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, rows)
        gradients = jax.tree.map(lambda gradient: jax.lax.psum(gradient, AXIS), gradients)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), jax.lax.psum(loss, AXIS)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(same, split), out_specs=(same, same), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=0)
    held = [state]

    def call() -> jax.Array:
        held[0], loss = jitted(held[0], rows)
        return loss

    return call


FORMS = {"replicax": replicax_form, "jax": jax_form}


def measure(
    *, form: str, variables: int, optimizer: str, worker: Worker | None
) -> dict[str, object]:
    """Measure the time until the first loss is there, and this process' seconds of CPU."""
    durations: dict[str, float] = {}

    def note(event: str, duration_secs: float, **_: object) -> None:
        name = event.rpartition("/")[2]
        durations[name] = durations.get(name, 0.0) + duration_secs

    call = FORMS[form](variables, optimizer, worker)
    # A later program of the same kind needs these as well: the client, its threads, the caches.
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    jax.monitoring.register_event_duration_secs_listener(note)
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = jax.block_until_ready(call())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "compiling": durations.get("backend_compile_duration", 0.0),
        "losses": [float(loss), float(call())],
        "versions": with_python(TRAINING_VERSIONS),
    }


if __name__ == "__main__":
    answer_question(measure)
