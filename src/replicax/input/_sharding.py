"""The sharing of one dataset among several workers."""

from __future__ import annotations

from replicax._enums import AutoShardPolicy
from replicax._hints import hint
from replicax.errors import InvalidArgument
from replicax.input._row_splitting import Workers
from replicax.input._source import CannotShardByFile, Source


def shard(source: Source, workers: Workers, policy: AutoShardPolicy) -> tuple[Source, bool]:
    """Return this worker's source, and whether no other worker reads it.

    If so, all of it is for this worker's replicas; otherwise every worker reads the same data and
    takes its replicas' rows of each batch.
    """
    if workers.count == 1:
        return source, False
    if policy is AutoShardPolicy.AUTO:
        policy = source.own_policy
    if policy is AutoShardPolicy.DATA:
        return source, False
    if policy is AutoShardPolicy.OFF:
        return source, True
    try:
        return source.shard_by_file(workers.count, workers.index), True
    except CannotShardByFile as reason:
        if policy is AutoShardPolicy.FILE:
            raise InvalidArgument(
                f"The dataset cannot be shared by files among {workers.count} workers: {reason}. "
                "Use `AutoShardPolicy.DATA`, or give each worker its part in "
                "`distribute_datasets_from_function`."
            ) from None
        hint(
            f"{workers.count} workers share this dataset by rows (AutoShardPolicy.DATA): it cannot "
            f"be shared by files, because {reason}. Every worker reads and prepares all of the "
            "data and drops what is for others; the results are right, but reading does not get "
            "faster with more workers. To choose otherwise, set `auto_shard_policy` in "
            "`rx.InputOptions` (DATA does the same without this warning), or read only a part in "
            "each worker with `strategy.distribute_datasets_from_function`."
        )
        return source, False
