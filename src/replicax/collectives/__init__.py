"""What replicas do together: one interface, an implementation for each execution."""

from replicax.collectives._across_arrays import AcrossArrays
from replicax.collectives._dispatch import is_awaited, launch
from replicax.collectives._in_program import InProgram
from replicax.collectives._interface import Collectives, require_numeric
from replicax.collectives._options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    merge_options,
)

__all__ = [
    "AcrossArrays",
    "CollectiveHints",
    "Collectives",
    "CommunicationImplementation",
    "CommunicationOptions",
    "InProgram",
    "is_awaited",
    "launch",
    "merge_options",
    "require_numeric",
]
