"""A worker that comes together with the others, and ends; or is hindered as the arguments say."""

from __future__ import annotations

import sys

import jax.numpy as jnp

import replicax as rx


def use_jax_first() -> None:
    jnp.ones(3)


if __name__ == "__main__":
    timeout_seconds, *hindrances = sys.argv[1:]
    if "used" in hindrances:
        use_jax_first()
    options = rx.experimental.CommunicationOptions(timeout_seconds=float(timeout_seconds))
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
    print(f"together: {strategy.num_replicas_in_sync} replicas", flush=True)
