"""Several resolvers as one."""

from __future__ import annotations

from typing import final

from replicax.cluster._spec import ClusterSpec, shown
from replicax.cluster.resolvers._resolver import (
    ClusterResolver,
    checked_task_id,
    checked_task_type,
    with_protocol,
)
from replicax.errors import ClusterError


@final
class UnionResolver(ClusterResolver):
    """One cluster, of which several resolvers each know a part.

    If a job is a list in all of them, the lists are joined, and repetitions of a list are left out.
    Otherwise, tasks are combined by their indices. The first resolver that knows says which task
    this process is.

    Args:
      resolvers: One or more.
      rpc_layer: The protocol prefix for the addresses of masters.
      task_type: The job that this process belongs to.
      task_id: Its index there.

    >>> from replicax.cluster_resolver import SimpleClusterResolver, UnionResolver
    >>> workers = SimpleClusterResolver({"worker": ["host0:2222"]}, task_type="worker", task_id=0)
    >>> servers = SimpleClusterResolver({"ps": ["host1:2222"]})
    >>> union = UnionResolver(workers, servers)
    >>> union.cluster_spec(), union.task_type
    (ClusterSpec({'ps': ['host1:2222'], 'worker': ['host0:2222']}), 'worker')
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        wrong = [resolver for resolver in resolvers if not isinstance(resolver, ClusterResolver)]
        if wrong or not resolvers:
            raise ClusterError(
                "A union is made of one or more cluster resolvers; got "
                f"{shown(wrong[0]) if wrong else 'none'}. For a dict or a `ClusterSpec`, use "
                "`SimpleClusterResolver`."
            )
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = checked_task_type(task_type)
        self._task_id = checked_task_id(task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the combined answers of the resolvers."""
        clusters = [resolver.cluster_spec() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for cluster in clusters for job in cluster.jobs)
        return ClusterSpec({job: _merged(job, clusters) for job in jobs})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task if one is given, otherwise the first that a resolver has."""
        protocol = rpc_layer or self._rpc_layer
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return with_protocol(address, protocol or self.rpc_layer)
        masters = (resolver.master(rpc_layer=protocol) for resolver in self._resolvers)
        return next((master for master in masters if master), "")

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the answer of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """The answer of the first resolver."""
        return self._resolvers[0].environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, from the first resolver that knows it."""
        if self._task_type is not None:
            return self._task_type
        resolver = self._first_that_knows_the_task()
        return None if resolver is None else resolver.task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = checked_task_type(task_type)

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, from the resolver that knows the job."""
        if self._task_id is not None:
            return self._task_id
        resolver = self._first_that_knows_the_task()
        return None if resolver is None else self._index_in_union(resolver)

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = checked_task_id(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix for the addresses of masters, from the first that has one."""
        layers = (self._rpc_layer, *(resolver.rpc_layer for resolver in self._resolvers))
        return next((layer for layer in layers if layer), None)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _first_that_knows_the_task(self) -> ClusterResolver | None:
        return next((each for each in self._resolvers if each.task_type is not None), None)

    def _index_in_union(self, resolver: ClusterResolver) -> int | None:
        """Return the resolver's own index, shifted by the tasks that come before its list."""
        job, index, own = resolver.task_type, resolver.task_id, resolver.cluster_spec()
        if job is None or index is None or job not in own.jobs:  # an evaluator, say, is in no list
            return index
        address, merged = own.task_address(job, index), self.cluster_spec()
        if index in merged.task_indices(job) and merged.task_address(job, index) == address:
            return index
        return merged.job_tasks(job).index(address)


def _merged(job: str, clusters: list[ClusterSpec]) -> list[str] | dict[int, str]:
    parts = [cluster.as_dict()[job] for cluster in clusters if job in cluster.jobs]
    lists = [part for part in parts if isinstance(part, list)]
    return _joined(job, lists) if len(lists) == len(parts) else _by_index(job, parts)


def _joined(job: str, lists: list[list[str]]) -> list[str]:
    joined: list[str] = []
    for position, addresses in enumerate(lists):
        if addresses in lists[:position]:
            continue
        repeated = sorted(set(addresses) & set(joined))
        if repeated:
            raise ClusterError(
                f"Resolvers disagree on job {job!r}: {', '.join(repeated)} is in lists that "
                f"differ, {shown(lists)}. Let the lists be the same, or have no address in common."
            )
        joined += addresses
    return joined


def _by_index(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    merged: dict[int, str] = {}
    for part in parts:
        for index, address in enumerate(part) if isinstance(part, list) else part.items():
            if merged.setdefault(index, address) != address:
                raise ClusterError(
                    f"Resolvers disagree on task {index} of job {job!r}: its address is "
                    f"{merged[index]!r} for one and {address!r} for another. Give each task one "
                    "address."
                )
    return merged
