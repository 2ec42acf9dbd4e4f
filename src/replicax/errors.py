"""The exceptions of replicax, in one tree.

Every class also derives from the built-in exception that a user of Python or
of the reference API would catch, so `except ValueError` still works.

    ReplicaxError
     ├─ ContextError          (RuntimeError)           wrong kind of context
     ├─ CollectiveMismatch    (RuntimeError)           replicas disagree on what to do together
     ├─ CopiesDiffer          (RuntimeError)           copies of a mirrored variable are not equal
     ├─ InconsistentTracing   (RuntimeError)           a function differed when traced again
     ├─ AuditFailed           (RuntimeError)           a compiled step differs from the eager one
     ├─ NotInitialized        (RuntimeError)           an iterator of v1 before `initialize()`
     ├─ ClusterError          (ValueError)             an invalid description of a cluster
     ├─ StartFailed           (RuntimeError)           workers could not start together
     ├─ WorkerLost            (RuntimeError)           another worker died, failed, left or is stuck
     ├─ ServerLost            (RuntimeError)           a parameter server died or does not answer
     ├─ ClosureCancelled      (RuntimeError)           not run, because an earlier one has failed
     ├─ ProgramMismatch       (RuntimeError)           workers are about to run different programs
     ├─ InputFailed           (RuntimeError)           the dataset failed, here or on another worker
     ├─ DeviceError           (ValueError)             unknown, repeated or missing device
     ├─ InvalidArgument       (ValueError)             an argument that cannot mean anything here
     │   ├─ ShapeMismatch                              shapes that do not fit each other
     │   ├─ ForeignValue                               belongs to another strategy
     │   └─ AggregationRequired                        a write that needs an aggregation
     ├─ InvalidType           (TypeError, ValueError)  a value of a type that does not fit
     │   ├─ StructureMismatch                          nests of different structure
     │   └─ MeetingInTrace                             replicas cannot meet inside `jax.jit`
     ├─ CheckpointError                                saving or restoring failed
     │   ├─ SaveFailed        (RuntimeError)           a checkpoint could not be written
     │   ├─ CheckpointNotFound (FileNotFoundError)     there is none at that path
     │   ├─ InvalidCheckpoint (ValueError)             damaged, cut off, or of another program
     │   └─ CheckpointMismatch (ValueError)            it does not fit the objects
     ├─ ExportFailed          (OSError)                a file of `rx.export` could not be written
     ├─ MissingLibrary        (ModuleNotFoundError)    an optional library is not installed
     └─ NotPicklable          (TypeError)              tied to this process's devices

There are four warnings, each a `UserWarning`: `PerformanceHint`, `InexactResumption`,
`SummedTwice` and `KnownBadVersion`.
"""

from typing import Any


class ReplicaxError(Exception):
    """The base of all errors that replicax raises on purpose.

    `follows_another` means that a worker raises it because another worker has failed. The error of
    that worker is the cause, so the user should see it first.
    """

    follows_another = False


class ContextError(ReplicaxError, RuntimeError):
    """A call was made in a context in which it has no meaning."""


class CollectiveMismatch(ReplicaxError, RuntimeError):
    """Replicas reached different collective calls, or one of them returned instead."""


class CopiesDiffer(ReplicaxError, RuntimeError):
    """The copies of a mirrored variable are not equal; raised by `rx.config.check_mirrored`."""


class InconsistentTracing(ReplicaxError, RuntimeError):
    """A function did something different when it was traced a second time."""


class AuditFailed(ReplicaxError, RuntimeError):
    """A compiled function did not compute what the same function computes eagerly.

    `report` is the `AuditReport`, with what differs and the result of the compiled function.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


class NotInitialized(ReplicaxError, RuntimeError):
    """An iterator that must be initialized first was asked for an element."""


class ClusterError(ReplicaxError, ValueError):
    """A description of a cluster (in TF_CONFIG, say) is malformed or contradicts itself."""


class StartFailed(ReplicaxError, RuntimeError):
    """The workers of a cluster did not all connect."""


class WorkerLost(ReplicaxError, RuntimeError):
    """Another worker died, failed, left or is stuck, so the workers cannot continue together."""


class ServerLost(ReplicaxError, RuntimeError):
    """A parameter server died or does not answer, and its variables are lost."""


class ClosureCancelled(ReplicaxError, RuntimeError):
    """A scheduled function was not run, because one that was scheduled before it has failed."""


class ProgramMismatch(ReplicaxError, RuntimeError):
    """Workers are about to run programs that differ."""


class InputFailed(ReplicaxError, RuntimeError):
    """The dataset of another worker failed, or a function in this one's raised StopIteration."""


class DeviceError(ReplicaxError, ValueError):
    """A device is unknown, was named twice, or does not exist yet."""


class InvalidArgument(ReplicaxError, ValueError):
    """An argument has a value that is meaningless here."""


class ShapeMismatch(InvalidArgument):
    """Shapes that must agree do not."""


class ForeignValue(InvalidArgument):
    """A distributed value or a variable belongs to another strategy."""


class AggregationRequired(InvalidArgument):
    """Replicas wrote to a mirrored variable that does not say how to combine their values."""


class InvalidType(ReplicaxError, TypeError, ValueError):
    """A value has a type that does not fit, such as a string in a sum."""


class StructureMismatch(InvalidType):
    """Replicas produced nests of different structure."""


class MeetingInTrace(InvalidType):
    """Eager replicas tried to meet inside a JAX transformation, where they have no numbers."""


class CheckpointError(ReplicaxError):
    """Saving or restoring a checkpoint did not succeed."""


class SaveFailed(CheckpointError, RuntimeError):
    """A checkpoint could not be written; earlier ones are unchanged."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path."""


class InvalidCheckpoint(CheckpointError, ValueError):
    """A directory is not a checkpoint, or is a damaged or incomplete one."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not match the objects that it was restored into."""


class ExportFailed(ReplicaxError, OSError):
    """The file of an export could not be written; an earlier file is unchanged."""


class PerformanceHint(UserWarning):
    """Something works, but could be much faster."""


class InexactResumption(UserWarning):
    """A pass over a dataset may not resume exactly where it stopped."""


class SummedTwice(UserWarning):
    """Gradients that have been summed over the replicas are about to be summed again."""


class KnownBadVersion(UserWarning):
    """The installed version of jaxlib is known to crash or to compute wrong numbers."""


class MissingLibrary(ReplicaxError, ModuleNotFoundError):
    """An optional library is needed and is not installed."""


class NotPicklable(ReplicaxError, TypeError):
    """The object holds memory of this process's devices and cannot be pickled."""
