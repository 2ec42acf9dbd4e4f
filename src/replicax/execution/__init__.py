"""How a function is run on the replicas."""

from replicax.execution._audit import Rehearsal, audit_functions
from replicax.execution._comparison import AuditDifference, AuditReport
from replicax.execution._compiled_runs import CompiledRuns
from replicax.execution._compiling import CompilingExecutor
from replicax.execution._direct import DirectExecutor
from replicax.execution._eager import EagerExecutor
from replicax.execution._executor import Executor, require_call
from replicax.execution._function import (
    Function,
    FunctionOfInstance,
    audit,
    function,
    run_functions_eagerly,
)
from replicax.execution._gradients import gradient_reduction_of, set_gradient_reduction
from replicax.execution._pulling import Element, NotOneProgram
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.execution._summed_twice import Site, warn_once

__all__ = [
    "AuditDifference",
    "AuditReport",
    "CompiledRuns",
    "CompilingExecutor",
    "DirectExecutor",
    "EagerExecutor",
    "Element",
    "Executor",
    "Function",
    "FunctionOfInstance",
    "Meeting",
    "Merger",
    "NotOneProgram",
    "Rehearsal",
    "ReplicaContext",
    "Site",
    "audit",
    "audit_functions",
    "function",
    "gradient_reduction_of",
    "require_call",
    "run_functions_eagerly",
    "set_gradient_reduction",
    "warn_once",
]
