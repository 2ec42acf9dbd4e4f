"""`rx.experimental`: names that the reference keeps there."""

from replicax._public import publish as _publish
from replicax.collectives import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax.experimental import partitioners
from replicax.input import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Optional
from replicax.strategies import (
    CentralStorageStrategy,
    ParameterServerStrategy,
    ValueContext,
)
from replicax.strategies import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from replicax.strategies import (
    ExperimentalTPUStrategy as TPUStrategy,
)
from replicax.termination import PreemptionCheckpointHandler, TerminationConfig

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "partitioners",
]

_publish(globals())
