"""Keras 3 under a strategy: `fit` of models made in a scope, and custom loops.

It is loaded automatically once `keras` is imported and a scope is entered. See docs/keras.md.
"""

from __future__ import annotations

from replicax.integrations.keras._backup import BackupAndRestore
from replicax.integrations.keras._bridge import bridge, uninstall

__all__ = ["BackupAndRestore", "bridge", "uninstall"]
BackupAndRestore.__module__ = "replicax"
