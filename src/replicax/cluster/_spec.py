"""The tasks of a cluster and their addresses, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from replicax._describing import described
from replicax.errors import ClusterError

# Jobs are checked one by one, hence `Any`: a list of addresses, or a dict of indices to addresses.
ClusterLike: TypeAlias = "ClusterSpec | Mapping[str, Any]"

_EXAMPLE = '{"worker": ["host0:2222", "host1:2222"]}'
_LONGEST = 120
# A job is a list up to its last task, so a mistyped index could take up all memory.
LARGEST_INDEX = 10**6


class ClusterSpec:
    """The address of each task of each job.

    Args:
      cluster: A dict of job names to lists of addresses, or to dicts of task indices to addresses
        when only some tasks are known; or another `ClusterSpec`.

    >>> import replicax as rx
    >>> cluster = rx.ClusterSpec({"worker": ["host0:2222", "host1:2222"], "ps": {3: "host2:2222"}})
    >>> cluster.num_tasks("worker"), cluster.task_address("ps", 3)
    (2, 'host2:2222')
    """

    __slots__ = ("_tasks",)

    def __init__(self, cluster: ClusterLike) -> None:
        if isinstance(cluster, ClusterSpec):
            # These dicts are never changed, so they can be shared.
            self._tasks: dict[str, dict[int, str]] = cluster._tasks
        elif isinstance(cluster, Mapping):
            self._tasks = {_checked_name(job): _checked_job(job, cluster[job]) for job in cluster}
        else:
            raise ClusterError(
                "A cluster is a dict of job names to the addresses of their tasks; got "
                f"{shown(cluster)}. Give something like {_EXAMPLE}."
            )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of a job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the tasks of a job, in order."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task."""
        job = self._job(job_name)
        if task_index not in job:
            raise ClusterError(
                f"There is no task {task_index!r} in job {job_name!r}. Its tasks are: {list(job)}. "
                "Ask for one of them, or add it to the cluster."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by task index; None for a task that is not known.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": {1: "host1:2222"}}).job_tasks("worker")
        [None, 'host1:2222']
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the jobs as a new dict, each a list if all its tasks are known, otherwise a dict.

        A job without tasks is an empty dict, as in the reference.
        """
        return {
            # Indices are in order: none is missing if the last equals the number before it.
            job: list(tasks.values()) if tasks and max(tasks) == len(tasks) - 1 else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def __eq__(self, other: object) -> bool:
        return self._tasks == other._tasks if isinstance(other, ClusterSpec) else NotImplemented

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._tasks:
            raise ClusterError(
                f"There is no job {name!r} in the cluster. Its jobs are: {self.jobs}. "
                "Ask for one of them, or add it to the cluster."
            )
        return self._tasks[name]


def shown(value: object) -> str:
    """Return a value's repr for error messages, shortened: a TF_CONFIG may be pages long.

    >>> from replicax.cluster._spec import shown
    >>> shown("a" * 200)[-6:]
    'aaa...'
    """
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # deeply nested, or a number with thousands of digits
        text = described(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def as_index(value: object) -> int | None:
    """Return the task index that an integer or a string of digits means, or None if it is not one.

    >>> from replicax.cluster._spec import as_index
    >>> as_index("3"), as_index(-1), as_index(True)
    (3, None, None)
    >>> as_index("9" * 5000)
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        # Python refuses to read thousands of digits.
        value = int(value) if len(value) <= len(str(LARGEST_INDEX)) else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_INDEX:
        return value
    return None


def _checked_name(job: object) -> str:
    if not isinstance(job, str) or not job:
        raise ClusterError(
            f"The name of a job is a string; got {shown(job)}. Give something like {_EXAMPLE}."
        )
    return job


def _checked_job(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        numbered = [(_checked_index(job, index), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        numbered = list(enumerate(tasks))
    else:
        raise ClusterError(
            f"The tasks of a job are a list of addresses, or a dict of indices to addresses; job "
            f"{job!r} has {shown(tasks)}. Give something like {_EXAMPLE}."
        )
    checked = {index: _checked_address(job, index, address) for index, address in numbered}
    if len(checked) < len(numbered):
        raise ClusterError(
            f"Every task of a job has one address; job {job!r} has {shown(tasks)}, in which an "
            "index occurs twice. Remove one of the two."
        )
    return dict(sorted(checked.items()))


def _checked_index(job: str, index: object) -> int:
    checked = as_index(index)
    if checked is None:
        raise ClusterError(
            f"The index of a task is an integer, 0 or more and at most {LARGEST_INDEX}; job "
            f"{job!r} has a task {shown(index)}. Number the tasks of each job from 0."
        )
    return checked


def _checked_address(job: str, index: int, address: object) -> str:
    if not isinstance(address, str) or not address.strip():
        raise ClusterError(
            f"The address of a task is a string such as 'host0:2222'; task {index} of job {job!r} "
            f"has {shown(address)}. Give the host and the port at which it can be reached."
        )
    return address
