"""`rx.tpu`: the coordinates of TPU cores, and the replicas that they form."""

from replicax.tpu import experimental

__all__ = ["experimental"]
