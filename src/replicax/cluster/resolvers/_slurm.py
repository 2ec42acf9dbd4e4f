"""A step of a Slurm job, as started by `srun`."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import final

from replicax.cluster._spec import ClusterSpec, as_index, shown
from replicax.cluster.resolvers._environment import Signs, required, required_number
from replicax.cluster.resolvers._resolver import ClusterResolver
from replicax.errors import ClusterError

_ADVICE = "Start the program with `srun`, or use another resolver."
_RANK = "SLURM_PROCID"
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@final
class SlurmClusterResolver(ClusterResolver):
    """A resolver that reads the environment of a Slurm job step.

    Tasks are numbered node by node, in the order of Slurm's list of nodes.

    Args:
      jobs: Job names and the number of tasks of each; by default, all are of the job "worker". Jobs
        get their tasks in the order of their names.
      port_base: The port of the first task on each node; every further task has the next port.
      gpus_per_node: By default, what Slurm allocated or, failing that, the number of those visible
        here.
      gpus_per_task: By default, those of a node, divided equally.
      tasks_per_node: A number, or a dict of host names to numbers; by default, as Slurm says.
      auto_set_gpu: Whether `cluster_spec()` leaves only this task's GPUs visible, by setting
        CUDA_VISIBLE_DEVICES. This has an effect only until JAX is first used.
      rpc_layer: The protocol prefix for the addresses of masters.

    >>> import os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> step = {
    ...     "SLURM_STEP_NODELIST": "node[09-10]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "2,1",
    ...     "SLURM_STEP_NUM_TASKS": "3",
    ...     "SLURM_PROCID": "1",
    ... }
    >>> with mock.patch.dict(os.environ, step):
    ...     resolver = rx.cluster_resolver.SlurmClusterResolver(auto_set_gpu=False)
    >>> resolver.cluster_spec().as_dict()
    {'worker': ['node09:8888', 'node09:8889', 'node10:8888']}
    >>> resolver.task_type, resolver.task_id
    ('worker', 1)
    """

    # `srun` sets both; a batch script, which is one process, gets only the first.
    _signs = Signs((_RANK, _NUM_TASKS), to_look={"auto_set_gpu": False})

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        rank = required_number(_RANK, advice=_ADVICE)
        if jobs is None:
            jobs = {"worker": required_number(_NUM_TASKS, advice=_ADVICE)}
        nodes = _tasks_of_nodes(tasks_per_node)
        _check_counts(jobs, nodes, rank)

        addresses = iter(
            [f"{node}:{port_base + task}" for node, count in nodes for task in range(count)]
        )
        # The reference assigns ranks to jobs by name, too: "chief" comes before "worker".
        self._cluster_spec = ClusterSpec(
            {job: list(itertools.islice(addresses, jobs[job])) for job in sorted(jobs)}
        )
        tasks = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
        self._task_type, self._task_id = tasks[rank]
        self._rpc_layer = rpc_layer

        most = max(count for _, count in nodes)
        gpus = _gpus_of_this_node() if gpus_per_node is None else gpus_per_node
        self._gpus_per_node = gpus
        self._gpus_per_task = gpus // most if gpus_per_task is None else gpus_per_task
        if most * self._gpus_per_task > gpus:
            raise ClusterError(
                f"{most} tasks on a node with {self._gpus_per_task} GPU(s) each need "
                f"{most * self._gpus_per_task}; a node has {gpus}. Lower `gpus_per_task`, or run "
                "fewer tasks on a node."
            )
        self._auto_set_gpu = auto_set_gpu
        within_node = [task for _, count in nodes for task in range(count)]
        # Slurm's own number is right for every way of distributing tasks over nodes.
        given = as_index(os.environ.get("SLURM_LOCALID"))
        self._index_on_node = within_node[rank] if given is None else given

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's tasks; with `auto_set_gpu`, leave only this task's GPUs visible."""
        if self._auto_set_gpu:
            self._show_own_gpus_only()
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one."""
        return self._address_of(task_type, task_id, rpc_layer) or ""

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process and its index there."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the number of GPUs of each task, without asking JAX."""
        del task_type, task_id, config_proto
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    def _show_own_gpus_only(self) -> None:
        visible = _visible_gpus()
        if visible is None:
            visible = [str(index) for index in range(self._gpus_per_node)]
        # If no more are visible than a task gets, they are the task's: chosen by Slurm (for `srun
        # --gpus-per-task`) or by an earlier call.
        if self._gpus_per_task and len(visible) > self._gpus_per_task:
            start = self._index_on_node * self._gpus_per_task
            own = visible[start : start + self._gpus_per_task]
            if len(own) < self._gpus_per_task:
                raise ClusterError(
                    f"Task {self._index_on_node} of this machine is to have {self._gpus_per_task} "
                    f"GPUs after the first {start}, but only {len(visible)} are visible "
                    f"({','.join(visible)}). Ask Slurm for as many GPUs as the tasks of a machine "
                    "use, or set `gpus_per_task`."
                )
            os.environ[_VISIBLE_GPUS] = ",".join(own)


def expand_nodes(text: str) -> list[str]:
    """Return the nodes in a Slurm list, in order.

    >>> from replicax.cluster.resolvers._slurm import expand_nodes
    >>> expand_nodes("node[08-10,12],other05")
    ['node08', 'node09', 'node10', 'node12', 'other05']
    """
    names: list[str] = []
    # A comma is between brackets if a "]" comes before the next "[".
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        pieces = re.split(r"\[([^\[\]]+)\]", part)
        if not part or any(mark in piece for piece in pieces[::2] for mark in "[] "):
            raise _bad_nodes(text)
        choices = [
            _expand_ranges(piece, text) if position % 2 else [piece]
            for position, piece in enumerate(pieces)
        ]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def expand_counts(text: str) -> list[int]:
    """Return the numbers in a Slurm list, in which `(x3)` means three times.

    >>> from replicax.cluster.resolvers._slurm import expand_counts
    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ClusterError(
                "SLURM_STEP_TASKS_PER_NODE is a list of numbers such as '2(x3),1'; got "
                f"{shown(text)}. Start the program with `srun`, or give `tasks_per_node`."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_ranges(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _bad_nodes(whole)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _bad_nodes(text: str) -> ClusterError:
    return ClusterError(
        "Slurm's list of nodes looks like 'node[1-3,7],other05'; got "
        f"{shown(text)}. Start the program with `srun`, or give `tasks_per_node` as a dict of "
        "host names to numbers."
    )


def _tasks_of_nodes(tasks_per_node: int | Mapping[str, int] | None) -> list[tuple[str, int]]:
    if isinstance(tasks_per_node, Mapping):
        return list(tasks_per_node.items())
    nodes = expand_nodes(required("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", advice=_ADVICE))
    if tasks_per_node is not None:
        return [(node, tasks_per_node) for node in nodes]
    counts = expand_counts(required("SLURM_STEP_TASKS_PER_NODE", advice=_ADVICE))
    if len(counts) != len(nodes):
        raise ClusterError(
            f"Slurm lists {len(nodes)} node(s), {shown(nodes)}, and the numbers of tasks of "
            f"{len(counts)}, {counts}. Start the program with `srun`, or give `tasks_per_node`."
        )
    return list(zip(nodes, counts, strict=True))


def _check_counts(jobs: Mapping[str, int], nodes: list[tuple[str, int]], rank: int) -> None:
    present = sum(count for _, count in nodes)
    if sum(jobs.values()) != present:
        raise ClusterError(
            f"The jobs need {sum(jobs.values())} task(s), {dict(jobs)}; Slurm runs {present} on "
            f"{shown(dict(nodes))}. Let `jobs` and `srun --ntasks` agree."
        )
    if rank >= present:
        raise ClusterError(
            f"SLURM_PROCID is below the number of tasks; got {rank} of {present}. {_ADVICE}"
        )


def _visible_gpus() -> list[str] | None:
    text = os.environ.get(_VISIBLE_GPUS)
    return None if text is None else [gpu for gpu in text.split(",") if gpu.strip()]


def _gpus_of_this_node() -> int:
    # Where Slurm binds GPUs to tasks, the visible ones are fewer than those of the node.
    allocated = as_index(os.environ.get("SLURM_GPUS_ON_NODE"))
    return len(_visible_gpus() or []) if allocated is None else allocated
