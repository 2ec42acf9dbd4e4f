"""Checkpoints: what they hold of objects, how they are saved and restored, who keeps which."""

from replicax.checkpoint._checkpoint import Checkpoint, require_outside
from replicax.checkpoint._finding import checkpoints_iterator, latest_checkpoint
from replicax.checkpoint._inventory import part_of, placed
from replicax.checkpoint._manager import CheckpointManager
from replicax.checkpoint._parts import (
    ArrayPart,
    Deferred,
    Kind,
    NameOf,
    PositionPart,
    TakenApart,
    ValuePart,
    register,
)
from replicax.checkpoint._report import RestoreReport

__all__ = [
    "ArrayPart",
    "Checkpoint",
    "CheckpointManager",
    "Deferred",
    "Kind",
    "NameOf",
    "PositionPart",
    "RestoreReport",
    "TakenApart",
    "ValuePart",
    "checkpoints_iterator",
    "latest_checkpoint",
    "part_of",
    "placed",
    "register",
    "require_outside",
]
