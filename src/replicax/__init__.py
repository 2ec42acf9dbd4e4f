"""replicax: the `tf.distribute.Strategy` programming model on JAX.

Write a training step once; a strategy decides on which devices and in how many replicas it runs.
"""

import typing as _typing

from replicax import (
    cluster_resolver,
    compat,
    config,
    coordinator,
    errors,
    experimental,
    metrics,
    parts,
    planning,
    preemption,
    tpu,
)
from replicax._enums import (
    GradientReduction,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._rank_zero import is_first_worker, print
from replicax.checkpoint import (
    Checkpoint,
    CheckpointManager,
    checkpoints_iterator,
    latest_checkpoint,
)
from replicax.cluster import ClusterSpec
from replicax.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax.execution import AuditDifference, AuditReport, ReplicaContext, audit, function
from replicax.exporting import export
from replicax.input import (
    AutoShardPolicy,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatches,
    from_tensor_slices,
)
from replicax.integrations.optax import Optimizer
from replicax.losses import compute_average_loss, scale_regularization_loss
from replicax.parameter_server import Server
from replicax.strategies import (
    FullyShardedStrategy,
    MirroredStrategy,
    MultiWorkerFullyShardedStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    RunOptions,
    Strategy,
    StrategyExtended,
    TPUStrategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.topology import Topology
from replicax.values import DistributedValues, Mirrored, PerReplica, first

# `rx.variables` is the function, and hides the package of that name, which users do not need;
# `from replicax.variables import ...` still works.
from replicax.variables import (
    IndexedSlices,
    Variable,
    assign,
    embedding_lookup,
    grad,
    make_variables,
    read,
    value_and_grad,
    variables,
)

__version__ = "0.1.0"

__all__ = [
    "AuditDifference",
    "AuditReport",
    "AutoShardPolicy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "FullyShardedStrategy",
    "GradientReduction",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerFullyShardedStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Optimizer",
    "ParameterServerStrategy",
    "PartialBatches",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Topology",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "assign",
    "audit",
    "checkpoints_iterator",
    "cluster_resolver",
    "compat",
    "compute_average_loss",
    "config",
    "coordinator",
    "embedding_lookup",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "export",
    "first",
    "from_tensor_slices",
    "function",
    "get_replica_context",
    "get_strategy",
    "grad",
    "has_strategy",
    "in_cross_replica_context",
    "is_first_worker",
    "latest_checkpoint",
    "make_variables",
    "metrics",
    "parts",
    "planning",
    "preemption",
    "print",
    "read",
    "scale_regularization_loss",
    "tpu",
    "value_and_grad",
    "variables",
]

# Each name has one public path: a name that is also in `rx.parts`, say, belongs here.
for _thing in [globals()[name] for name in __all__]:
    if getattr(_thing, "__module__", "").startswith("replicax."):
        _thing.__module__ = "replicax"


def __getattr__(name: str) -> _typing.Any:
    """Look up a name that needs an optional library."""
    if name != "BackupAndRestore":
        raise AttributeError(f"module 'replicax' has no attribute {name!r}")
    try:
        from replicax.integrations.keras import BackupAndRestore
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`rx.BackupAndRestore` is for Keras, which is not installed: pip install "
            "'replicax[keras]'."
        ) from error
    return BackupAndRestore
