"""Workers and parameter servers that Ray starts."""

from __future__ import annotations

from typing import final

from replicax._describing import described
from replicax.cluster._spec import ClusterSpec
from replicax.cluster.resolvers._resolver import ClusterResolver
from replicax.errors import ClusterError


@final
class RayClusterResolver(ClusterResolver):
    """A resolver of workers and parameter servers that need no programs of their own.

    Ray starts them when a `ParameterServerStrategy` is made. This process is their chief.

    Args:
      num_workers: The number of workers.
      num_ps: The number of parameter servers.
      address: The address of a Ray cluster, such as "10.0.0.1:6379", or "auto" for the one that
        this machine is part of. By default, Ray is started on this machine, and stopped with the
        program.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.RayClusterResolver(num_workers=2, num_ps=1)
    >>> resolver.cluster_spec().num_tasks("worker"), resolver.task_type
    (2, 'chief')
    """

    def __init__(self, num_workers: int, num_ps: int, address: str | None = None) -> None:
        for name, number in (("num_workers", num_workers), ("num_ps", num_ps)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ClusterError(
                    f"`{name}` must be a whole number, 1 or more; got {described(number)}."
                )
        if address is not None and (not isinstance(address, str) or not address):
            raise ClusterError(
                "`address` must be that of a Ray cluster, such as '10.0.0.1:6379', or 'auto'; got "
                f"{described(address)}."
            )
        self._numbers = {"chief": 1, "worker": num_workers, "ps": num_ps}
        self._address = address
        self._task_type, self._task_id = "chief", 0

    @property
    def address(self) -> str | None:
        """The address of the Ray cluster; None for one on this machine that is started."""
        return self._address

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks. Ray decides where they are, so their addresses are names."""
        return ClusterSpec(
            {
                job: [f"ray-{job}-{index}" for index in range(number)]
                for job, number in self._numbers.items()
            }
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the name of a task, by default that of the chief."""
        return self._address_of(task_type, task_id, rpc_layer) or ""

    @property
    def environment(self) -> str:
        """Always "ray"."""
        return "ray"
