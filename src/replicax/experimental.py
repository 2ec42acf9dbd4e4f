"""`rx.experimental`: names that the reference keeps there."""

from replicax.collectives import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax.input import Optional
from replicax.strategies import CentralStorageStrategy, ValueContext

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Optional",
    "ValueContext",
]
