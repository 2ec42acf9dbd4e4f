"""Flax NNX under a strategy: modules, optimizers, metrics and random streams in `run`.

Loaded by itself once `flax.nnx` is imported. docs/flax.md says what it does.
"""

from __future__ import annotations

from replicax.integrations.flax._bridge import bridge

__all__ = ["bridge"]
