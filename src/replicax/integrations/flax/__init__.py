"""Flax NNX under a strategy: modules, optimizers, metrics and random streams in `run`.

It is loaded automatically once `flax.nnx` is imported. See docs/flax.md.
"""

from __future__ import annotations

from replicax.integrations.flax._bridge import bridge

__all__ = ["bridge"]
