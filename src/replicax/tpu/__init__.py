"""`rx.tpu`: the places of the cores of TPUs, and the replicas that they form."""

from replicax.tpu import experimental

__all__ = ["experimental"]
