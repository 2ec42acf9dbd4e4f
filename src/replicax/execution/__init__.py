"""The execution of functions on the replicas."""

from replicax.execution._audit import Rehearsal, audit_functions
from replicax.execution._closure import (
    ClosureCall,
    ClosureWrite,
    IteratorArgument,
    Stage,
    TracedClosure,
    exported,
    kind_of,
)
from replicax.execution._comparison import AuditDifference, AuditReport
from replicax.execution._compiling_executor import CompilingExecutor
from replicax.execution._direct import DirectExecutor
from replicax.execution._eager import EagerExecutor
from replicax.execution._executor import Executor, require_call
from replicax.execution._function import (
    Function,
    FunctionOfInstance,
    audit,
    function,
    run_functions_eagerly,
    runs_as_python,
)
from replicax.execution._function_cache import FunctionCache
from replicax.execution._gradient_reduction import gradient_reduction_of, set_gradient_reduction
from replicax.execution._iterator_elements import Element, NotOneProgram
from replicax.execution._persistent_cache import compilation_cache
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.execution._summed_twice import Site, warn_once

__all__ = [
    "AuditDifference",
    "AuditReport",
    "ClosureCall",
    "ClosureWrite",
    "CompilingExecutor",
    "DirectExecutor",
    "EagerExecutor",
    "Element",
    "Executor",
    "Function",
    "FunctionCache",
    "FunctionOfInstance",
    "IteratorArgument",
    "Meeting",
    "Merger",
    "NotOneProgram",
    "Rehearsal",
    "ReplicaContext",
    "Site",
    "Stage",
    "TracedClosure",
    "audit",
    "audit_functions",
    "compilation_cache",
    "exported",
    "function",
    "gradient_reduction_of",
    "kind_of",
    "require_call",
    "run_functions_eagerly",
    "runs_as_python",
    "set_gradient_reduction",
    "warn_once",
]
