"""A cluster that is spelled out in the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from replicax.cluster._spec import ClusterLike, ClusterSpec, shown
from replicax.cluster.resolvers._resolver import (
    ClusterResolver,
    checked_task_id,
    checked_task_type,
    with_protocol,
)
from replicax.errors import ClusterError


@final
class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns its arguments.

    Args:
      cluster_spec: The cluster, or a dict that describes it.
      master: The answer of `master()` when it is not asked for a particular task.
      task_type: The job that this process belongs to.
      task_id: Its index there.
      environment: A name for where this runs.
      num_accelerators: The answer of `num_accelerators()`; nothing is looked up.
      rpc_layer: The protocol prefix for the addresses of masters.

    >>> import replicax as rx
    >>> workers = {"worker": ["host0:2222", "host1:2222"]}
    >>> resolver = rx.cluster_resolver.SimpleClusterResolver(workers, task_type="worker", task_id=1)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['host0:2222', 'host1:2222']})
    """

    def __init__(
        self,
        cluster_spec: ClusterLike,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(master, str):
            raise ClusterError(
                f"A master is the address of a task; got {shown(master)}. "
                "Give a string such as 'host0:2222'."
            )
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._task_type = checked_task_type(task_type)
        self._task_id = checked_task_id(task_id)
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster that was given."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task if one is asked for, otherwise the master that was given."""
        if task_type is None or task_id is None:
            address = self._master
        else:
            address = self._cluster_spec.task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the accelerators that were given."""
        del task_type, task_id, config_proto
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """The environment that was given."""
        return self._environment
