"""Optax transformations as optimizers of variables."""

from __future__ import annotations

from replicax.integrations.optax._optimizer import Optimizer

__all__ = ["Optimizer"]
