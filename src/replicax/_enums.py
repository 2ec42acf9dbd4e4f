"""The words of the API: how replicas combine, and when copies are brought together."""

from __future__ import annotations

import enum
from typing import Self

from replicax.errors import InvalidArgument


class _Word(enum.Enum):
    """An enumeration whose members are also accepted by name, in any case."""

    @classmethod
    def parse(cls, word: Self | str) -> Self:
        if isinstance(word, cls):
            return word
        if isinstance(word, str) and word.upper() in cls.__members__:
            return cls[word.upper()]
        choices = ", ".join(cls.__members__)
        raise InvalidArgument(
            f"Unknown {cls.__name__}: {word!r}. Use one of {choices}, "
            f"as {cls.__name__}.{next(iter(cls.__members__))} or as a word in any case."
        )


class ReduceOp(_Word):
    """How values of several replicas become one.

    >>> import replicax as rx
    >>> rx.ReduceOp.parse("mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"


class GradientReduction(_Word):
    """How the gradients of the replicas become those that an optimizer applies.

    SUM: for losses that are divided by the size of the global batch. MEAN: for losses that are
    means over the replica's own rows; weighted by these rows where they are known. NONE: for
    gradients that are equal on all replicas already.

    >>> import replicax as rx
    >>> rx.GradientReduction.parse("mean")
    <GradientReduction.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class VariableAggregation(_Word):
    """How the values that replicas write to one variable are combined."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class VariableSynchronization(_Word):
    """When the copies of a variable are brought together."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class AutoShardPolicy(_Word):
    """How several workers share one dataset.

    AUTO chooses FILE where that is possible and DATA otherwise. FILE: each worker reads files of
    its own. DATA: each reads everything, and keeps its rows of every batch. OFF: each keeps
    everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


class InputReplicationMode(_Word):
    """For whom a function that makes datasets is called: for each worker, or for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class PartialBatches(_Word):
    """How a batch with fewer rows than a full one is divided over the replicas.

    EVEN: as evenly as possible, as every batch is. IN_ORDER: each replica takes its share of a
    full batch, in order, until the rows run out.
    """

    EVEN = "EVEN"
    IN_ORDER = "IN_ORDER"
