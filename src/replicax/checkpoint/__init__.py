"""Checkpoints: their contents, saving and restoring them, and which ones are kept."""

from replicax.checkpoint._checkpoint import Checkpoint, require_outside
from replicax.checkpoint._entries import (
    ArrayEntry,
    Deferred,
    NameOf,
    ObjectEntries,
    PositionEntry,
    TypeHandler,
    ValueEntry,
    register,
)
from replicax.checkpoint._inventory import entry_of, placed
from replicax.checkpoint._latest import checkpoints_iterator, latest_checkpoint
from replicax.checkpoint._manager import CheckpointManager
from replicax.checkpoint._report import RestoreReport

__all__ = [
    "ArrayEntry",
    "Checkpoint",
    "CheckpointManager",
    "Deferred",
    "NameOf",
    "ObjectEntries",
    "PositionEntry",
    "RestoreReport",
    "TypeHandler",
    "ValueEntry",
    "checkpoints_iterator",
    "entry_of",
    "latest_checkpoint",
    "placed",
    "register",
    "require_outside",
]
