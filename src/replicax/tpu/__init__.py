"""`rx.tpu`: where the cores of TPUs lie, and which of them form which replica."""

from replicax.tpu import experimental

__all__ = ["experimental"]
