"""Keras 3 under a strategy: `fit` of models made in a scope, and custom loops.

Loaded by itself once `keras` is imported and a scope is entered. docs/keras.md says what it does.
"""

from __future__ import annotations

from replicax.integrations.keras._backup import BackupAndRestore
from replicax.integrations.keras._bridge import bridge

__all__ = ["BackupAndRestore", "bridge"]
BackupAndRestore.__module__ = "replicax"
