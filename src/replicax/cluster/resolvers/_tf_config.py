"""The environment variable TF_CONFIG, which most launchers set."""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn, final

from replicax.cluster._spec import LARGEST_INDEX, ClusterSpec, as_index, shown
from replicax.cluster.resolvers._environment import Signs
from replicax.cluster.resolvers._resolver import (
    ClusterResolver,
    checked_task_id,
    checked_task_type,
)
from replicax.errors import ClusterError

_VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}}'


@final
class TFConfigClusterResolver(ClusterResolver):
    """A resolver that reads the environment variable TF_CONFIG each time it is asked.

    Without that variable the cluster is empty. Arguments take precedence over it.

    Args:
      task_type: The job that this process belongs to.
      task_id: Its index there.
      rpc_layer: The protocol prefix for the addresses of masters.
      environment: A name for where this runs.

    >>> import json, os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> cluster = {"worker": ["host0:2222", "host1:2222"]}
    >>> config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    >>> resolver = rx.cluster_resolver.TFConfigClusterResolver()
    >>> with mock.patch.dict(os.environ, TF_CONFIG=config):
    ...     print(resolver.task_type, resolver.task_id, resolver.master())
    worker 1 host1:2222
    """

    _signs = Signs((_VARIABLE,))

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = checked_task_type(task_type)
        self._task_id = checked_task_id(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster that TF_CONFIG describes."""
        cluster = _field("cluster", dict, "an object of job names to lists of addresses")
        try:
            return ClusterSpec(cluster or {})
        except ClusterError as error:
            raise ClusterError(
                f"The environment variable {_VARIABLE} cannot be used. {error}"
            ) from None

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one, or "" if it is the only one.

        A field "session_master" in TF_CONFIG takes precedence over all of this.
        """
        given = _field("session_master", str, "a string")
        if given is not None:
            return given
        cluster = self.cluster_spec()
        if sum(cluster.num_tasks(job) for job in cluster.jobs) <= 1:
            return ""
        address = self._address_of(task_type, task_id, rpc_layer)
        if address is None:
            _refuse("It does not say which task of the cluster this process is")
        return address

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to, or None if TF_CONFIG has no field "task"."""
        return _task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = checked_task_type(task_type)

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if TF_CONFIG does not say."""
        return _task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = checked_task_id(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix for the addresses of masters, or None if TF_CONFIG has none."""
        return self._rpc_layer or _field("rpc_layer", str, "a string")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        """A name for where this runs, such as "cloud"; empty if TF_CONFIG has none."""
        if self._environment is not None:
            return self._environment
        return _field("environment", str, "a string") or ""


def _task_type() -> str | None:
    task = _field("task", dict, "an object with a type and an index")
    if task is None:
        return None
    if "type" not in task:
        _refuse('The field "task" has no "type"')
    if isinstance(task["type"], int) and not isinstance(task["type"], bool):
        return str(task["type"])  # the name of a job may be a number
    if not isinstance(task["type"], str) or not task["type"]:
        _refuse('The type of the task is not a string such as "worker"')
    return task["type"]


def _task_id() -> int | None:
    task = _field("task", dict, "an object with a type and an index")
    if task is None or "index" not in task:
        return None
    # Some tools write the index as a string: `"index": "0"`.
    index = as_index(task["index"])
    if index is None:
        _refuse(f"The index of the task is not an integer, 0 or more and at most {LARGEST_INDEX}")
    return index


def _field(name: str, kind: type, description: str) -> Any:
    """Return a field of TF_CONFIG, or None if it is missing."""
    value = _read().get(name)
    if value is not None and not isinstance(value, kind):
        _refuse(f'The field "{name}" is not {description}')
    return value


def _read() -> dict[str, object]:
    text = os.environ.get(_VARIABLE)
    if text is None:
        return {}
    try:
        config = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        _refuse("It is nested too deeply")
    except ValueError as error:  # including a number with more digits than Python reads
        _refuse(f"It is not JSON ({error})")
    if not isinstance(config, dict):
        _refuse("It is JSON, but not an object")
    return config


def _refuse_constant(name: str) -> NoReturn:
    """Refuse Infinity and NaN, which Python's parser accepts, but JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def _refuse(problem: str) -> NoReturn:
    raise ClusterError(
        f"The environment variable {_VARIABLE} cannot be used. {problem}; got "
        f"{shown(os.environ.get(_VARIABLE))}. Set it to something like {_EXAMPLE}, or unset it."
    ) from None
