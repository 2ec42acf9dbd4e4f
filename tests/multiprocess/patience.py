"""Workers that take their time, longer than the time-out, and must not be taken for lost."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

import replicax as rx

TIMEOUT = 1.5


def main() -> None:
    options = rx.experimental.CommunicationOptions(timeout_seconds=TIMEOUT)
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
    worker = strategy.cluster_resolver.task_id

    # Both are in one program, which takes as long as it takes.
    def nap(x):
        time.sleep(3 * TIMEOUT)
        return x

    @rx.function
    def long_program():
        def replica():
            x = jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), jnp.ones(()))
            return rx.get_replica_context().all_reduce("SUM", x)

        return strategy.run(replica)

    value = strategy.experimental_local_results(long_program())[0]
    print(f"both: {float(value)}", flush=True)

    # One has still something to do after the last sum, when the other has finished.
    def longer_nap(x):
        time.sleep(3 * TIMEOUT if worker == 1 else 0)
        return x

    @rx.function
    def last_program():
        def replica():
            x = rx.get_replica_context().all_reduce("SUM", jnp.ones(()))
            return jax.pure_callback(longer_nap, jax.ShapeDtypeStruct((), jnp.float32), x)

        return strategy.run(replica)

    value = strategy.experimental_local_results(last_program())[0]
    print(f"last: {float(value)}", flush=True)


if __name__ == "__main__":
    main()
