"""The user's options for input, and the context of functions that make datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from replicax._enums import (
    AutoShardPolicy,
    AutoShardPolicyLike,
    InputReplicationMode,
    PartialBatches,
    PartialBatchesLike,
    ReplicationModeLike,
)
from replicax.errors import InvalidArgument, InvalidType


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options for distributing a dataset.

    Args:
      experimental_fetch_to_device: Whether elements are brought to the replicas' devices ahead of
        their use. If not, their components are NumPy arrays.
      experimental_replication_mode: Whether the function given to
        `distribute_datasets_from_function` is called for each worker or for each replica.
      experimental_place_dataset_on_device: Whether elements are kept on the devices, so that the
        dataset is read and brought there once, however often it is iterated over. Requires
        PER_REPLICA, and replaces `experimental_fetch_to_device`.
      experimental_per_replica_buffer_size: The number of elements kept ready on the devices.
      auto_shard_policy: How several workers share the dataset.
      global_batch_size: For a dataset of single examples: how many of them make a batch.
      partial_batches: How `experimental_distribute_dataset` divides a batch that has fewer rows
        than a full one, such as the last: "even", or "in_order", where each replica takes its
        share of a full batch until the rows run out.

    >>> import replicax as rx
    >>> rx.InputOptions(auto_shard_policy="data").auto_shard_policy
    <AutoShardPolicy.DATA: 'DATA'>
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    global_batch_size: int | None = None
    partial_batches: PartialBatches = PartialBatches.EVEN

    if TYPE_CHECKING:  # users may also pass names, which become members

        def __init__(
            self,
            experimental_fetch_to_device: bool = True,
            experimental_replication_mode: ReplicationModeLike = InputReplicationMode.PER_WORKER,
            experimental_place_dataset_on_device: bool = False,
            experimental_per_replica_buffer_size: int = 1,
            auto_shard_policy: AutoShardPolicyLike = AutoShardPolicy.AUTO,
            global_batch_size: int | None = None,
            partial_batches: PartialBatchesLike = PartialBatches.EVEN,
        ) -> None: ...

    def __post_init__(self) -> None:
        mode = InputReplicationMode.parse(self.experimental_replication_mode)
        object.__setattr__(self, "experimental_replication_mode", mode)
        policy = AutoShardPolicy.parse(self.auto_shard_policy)
        object.__setattr__(self, "auto_shard_policy", policy)
        partial_batches = PartialBatches.parse(self.partial_batches)
        object.__setattr__(self, "partial_batches", partial_batches)
        for flag in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidType(f"`{flag}` is True or False; got {getattr(self, flag)!r}.")
        _require_count(
            "experimental_per_replica_buffer_size", self.experimental_per_replica_buffer_size
        )
        if self.global_batch_size is not None:
            _require_count("global_batch_size", self.global_batch_size)
        if not self.experimental_place_dataset_on_device:
            return
        if mode is not InputReplicationMode.PER_REPLICA:
            raise InvalidArgument(
                "`experimental_place_dataset_on_device` gives each replica's device a dataset of "
                f"its own, which needs PER_REPLICA; got {mode.value}. Say "
                "`experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA`."
            )
        if self.experimental_fetch_to_device:
            raise InvalidArgument(
                "Elements of a dataset that is on the device need not be fetched to it; got "
                "`experimental_place_dataset_on_device=True` and "
                "`experimental_fetch_to_device=True`. Say `experimental_fetch_to_device=False`."
            )


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """The part of the input for which `distribute_datasets_from_function` wants a dataset.

    >>> import replicax as rx
    >>> context = rx.InputContext(num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return how many rows of a global batch each replica gets, if it divides evenly."""
        _require_count("global_batch_size", global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise InvalidArgument(
                f"A global batch of {global_batch_size} does not divide over "
                f"{self.num_replicas_in_sync} replicas. Choose a multiple, or give the dataset to "
                "`experimental_distribute_dataset`, which divides batches of any size."
            )
        return global_batch_size // self.num_replicas_in_sync


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidType(f"`{name}` must be a whole number; got {value!r}.")
    if value < 1:
        raise InvalidArgument(f"`{name}` must be at least 1; got {value}.")
