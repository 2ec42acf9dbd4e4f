"""The questions that every resolver answers."""

from __future__ import annotations

import abc
from collections import Counter
from typing import ClassVar

import jax

from replicax.cluster._spec import ClusterSpec, as_index, shown
from replicax.cluster.resolvers._environment import Signs
from replicax.errors import ClusterError


class ClusterResolver(abc.ABC):
    """An object from which a process learns its cluster, and its own task in it.

    To describe clusters in a way of your own, subclass it and implement `cluster_spec` and
    `master`.

    >>> import replicax as rx
    >>> class OnThisMachine(rx.cluster_resolver.ClusterResolver):
    ...     def cluster_spec(self):
    ...         return rx.ClusterSpec({"worker": ["localhost:2222", "localhost:2223"]})
    ...
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return ""
    >>> resolver = OnThisMachine()
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    'localhost:2223'
    """

    _signs: ClassVar[Signs] = Signs()

    # Defined on the class, so that subclasses need not call `super().__init__`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster as it is now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one, with the protocol if there is one."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Count this process's accelerators of each kind, such as `{"GPU": 2}`; CPUs do not count.

        This asks JAX, and so starts it: in a cluster, make the strategy first. Nothing is known
        about other tasks, so the arguments make no difference.
        """
        del task_type, task_id, config_proto
        kinds = (device.platform.upper() for device in jax.local_devices())
        return dict(Counter(kind for kind in kinds if kind != "CPU"))

    @property
    def environment(self) -> str:
        """A name for where this runs; empty if none is needed."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to, such as "worker", or None if that is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = checked_task_type(task_type)

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if that is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = checked_task_id(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix for the addresses of masters, such as "grpc"."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _address_of(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str | None:
        """Return the address of a task, by default this one, or None if that is not known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return None
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self.rpc_layer)


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """Return the address, as a URL if there is a protocol.

    >>> from replicax.cluster.resolvers._resolver import with_protocol
    >>> with_protocol("host0:2222", "grpc"), with_protocol("host0:2222", None)
    ('grpc://host0:2222', 'host0:2222')
    """
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def checked_task_type(task_type: object) -> str | None:
    """Return the task type; raise `ClusterError` if it cannot be one."""
    if task_type is None or (isinstance(task_type, str) and task_type):
        return task_type
    raise ClusterError(
        f"The type of a task is the name of its job; got {shown(task_type)}. "
        'Give a string such as "worker".'
    )


def checked_task_id(task_id: object) -> int | None:
    """Return the index of a task as an integer; raise `ClusterError` if it cannot be one."""
    index = as_index(task_id)
    if index is None and task_id is not None:
        raise ClusterError(
            f"The id of a task is its index in its job, 0 or more; got {shown(task_id)}. "
            "Give an integer."
        )
    return index
