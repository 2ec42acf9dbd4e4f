"""`rx.coordinator`: functions that are scheduled on the workers of a `ParameterServerStrategy`."""

from replicax._public import publish as _publish
from replicax.coordinator._closures import RemoteValue
from replicax.coordinator._coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
)
from replicax.coordinator._per_worker import PerWorkerDataset, PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

_publish(globals())
