"""The words of the API: how values are combined, when copies are brought together, and so on."""

from __future__ import annotations

import enum
from typing import Literal, Self, TypeAlias

from replicax.errors import InvalidArgument


class _Word(enum.Enum):
    """An enumeration whose members are also accepted by name, which is case-insensitive.

    For each one, the type of what users may pass, such as `ReduceOpLike`, lists the names in upper
    and in lower case.
    """

    @classmethod
    def parse(cls, word: Self | str) -> Self:
        if isinstance(word, cls):
            return word
        if isinstance(word, str) and word.upper() in cls._words():
            return cls[word.upper()]
        others = [str(member) for member in cls if member.name not in cls._words()]
        raise InvalidArgument(
            f"Unknown {cls.__name__}: {word!r}. Use one of {', '.join(cls._words())}, "
            f"as {next(iter(cls))} or as a word in any case"
            + (f"; or {', '.join(others)}." if others else ".")
        )

    @classmethod
    def _words(cls) -> tuple[str, ...]:
        """Return the names that are accepted as words."""
        return tuple(cls.__members__)


class ReduceOp(_Word):
    """The way in which values of several replicas become one; `collectives/` defines each op.

    >>> import replicax as rx
    >>> rx.ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"

    @classmethod
    def _words(cls) -> tuple[str, ...]:
        # Only the words of the reference are accepted; there any other is a `ValueError`. Ops that
        # it does not have must be given as members.
        return "SUM", "MEAN"


ReduceOpLike: TypeAlias = ReduceOp | Literal["SUM", "sum", "MEAN", "mean"]


class GradientReduction(_Word):
    """The way in which the gradients of the replicas become those that an optimizer applies.

    SUM: for losses that are divided by the size of the global batch. MEAN: for losses that are
    means over the replica's own rows; weighted by the number of rows where that is known. NONE: for
    gradients that are already equal on all replicas.

    >>> import replicax as rx
    >>> rx.GradientReduction.parse("mean")
    <GradientReduction.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


GradientReductionLike: TypeAlias = (
    GradientReduction | Literal["SUM", "MEAN", "NONE", "sum", "mean", "none"]
)


class VariableAggregation(_Word):
    """The way in which the values that replicas write to one variable are combined."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


AggregationLike: TypeAlias = (
    VariableAggregation
    | Literal[
        "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA", "none", "sum", "mean", "only_first_replica"
    ]
)


class VariableSynchronization(_Word):
    """The time at which the copies of a variable are brought together."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


SynchronizationLike: TypeAlias = (
    VariableSynchronization
    | Literal["AUTO", "NONE", "ON_WRITE", "ON_READ", "auto", "none", "on_write", "on_read"]
)


class AutoShardPolicy(_Word):
    """The way in which several workers share one dataset.

    AUTO chooses FILE where that is possible and DATA otherwise. FILE: each worker reads files of
    its own. DATA: each reads everything, and keeps its rows of every batch. OFF: each keeps
    everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


AutoShardPolicyLike: TypeAlias = (
    AutoShardPolicy | Literal["AUTO", "FILE", "DATA", "OFF", "auto", "file", "data", "off"]
)


class InputReplicationMode(_Word):
    """The unit for which a function that makes datasets is called: each worker, or each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


ReplicationModeLike: TypeAlias = (
    InputReplicationMode | Literal["PER_WORKER", "PER_REPLICA", "per_worker", "per_replica"]
)


class PartialBatches(_Word):
    """The way in which a batch with fewer rows than a full one is divided over the replicas.

    EVEN: as evenly as possible, like every other batch. IN_ORDER: each replica takes its share of a
    full batch, in order, until the rows run out.
    """

    EVEN = "EVEN"
    IN_ORDER = "IN_ORDER"


PartialBatchesLike: TypeAlias = PartialBatches | Literal["EVEN", "IN_ORDER", "even", "in_order"]
