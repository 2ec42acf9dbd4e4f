"""Pods of Kubernetes: found by their labels, or the numbered ones of a Job or JobSet."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax.cluster._spec import ClusterSpec, as_index, shown
from replicax.cluster.resolvers._environment import Signs, required, required_number
from replicax.cluster.resolvers._resolver import (
    ClusterResolver,
    checked_task_id,
    checked_task_type,
)
from replicax.errors import ClusterError

_DEFAULT_LABELS = {"worker": ["job-name=tensorflow"]}
_INDEX = "JOB_COMPLETION_INDEX"
_NUM_WORKERS = "REPLICAX_NUM_WORKERS"
_SUBDOMAIN = "REPLICAX_SUBDOMAIN"


@final
class KubernetesClusterResolver(ClusterResolver):
    """A resolver that finds pods by labels, or computes host names of an indexed Job or a JobSet.

    Labels are looked up, with the package `kubernetes`, if they or a client are given. Otherwise,
    if the number of workers is given or the package is not installed, this pod's environment must
    say everything: see docs/clusters.md. Failing both, the label is "job-name=tensorflow", as in
    the reference.

    Args:
      job_to_label_mapping: For each job, the label selectors of its pods.
      tf_server_port: The port of every task.
      rpc_layer: The protocol prefix for the addresses of masters.
      override_client: A `kubernetes.client.CoreV1Api`, or an object that has its
        `list_pod_for_all_namespaces`.
      num_workers: The number of pods of the Job, by default REPLICAX_NUM_WORKERS.
      subdomain: The headless service of the pods, by default REPLICAX_SUBDOMAIN or, in a JobSet,
        its name.

    >>> import os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.KubernetesClusterResolver(num_workers=2, subdomain="pods")
    >>> with mock.patch.dict(os.environ, JOB_COMPLETION_INDEX="1", HOSTNAME="train-1"):
    ...     print(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    ClusterSpec({'worker': ['train-0.pods:8470', 'train-1.pods:8470']}) worker 1
    """

    # Kubernetes sets the first one in every indexed Job, whether or not its pods work together.
    _signs = Signs((_INDEX, _NUM_WORKERS), names_come_later=True)

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        *,
        num_workers: int | None = None,
        subdomain: str | None = None,
    ) -> None:
        self._labels = dict(job_to_label_mapping or {})
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._num_workers = num_workers
        self._subdomain = subdomain

    def cluster_spec(self) -> ClusterSpec:
        """Return the pods as they are now."""
        if self._is_numbered:
            hosts = _Numbering.read(self._num_workers, self._subdomain).hosts
            return ClusterSpec({"worker": [f"{host}:{self._port}" for host in hosts]})
        client = _default_client() if self._client is None else self._client
        labels = self._labels or _DEFAULT_LABELS
        return ClusterSpec(
            {
                job: [f"{address}:{self._port}" for address in _running(client, job, selectors)]
                for job, selectors in labels.items()
            }
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one, or "" if that is not known."""
        return self._address_of(task_type, task_id, rpc_layer) or ""

    @property
    def task_type(self) -> str | None:
        """The job of this pod: "worker" if it has a number, otherwise the one it was set to."""
        if self._task_type is None and self._is_numbered and _INDEX in os.environ:
            return "worker"
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = checked_task_type(task_type)

    @property
    def task_id(self) -> int | None:
        """The index of this pod in its job: its number if it has one, otherwise the given one."""
        if self._task_id is None and self._is_numbered and _INDEX in os.environ:
            return _Numbering.read(self._num_workers, self._subdomain).own_index
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = checked_task_id(task_id)

    @property
    def _is_numbered(self) -> bool:
        """True if this pod's environment must say everything, so that Kubernetes is not queried."""
        if self._labels or self._client is not None:
            return False
        given = self._num_workers is not None or _NUM_WORKERS in os.environ
        return given or importlib.util.find_spec("kubernetes") is None


@dataclass(frozen=True, slots=True)
class _Numbering:
    """Pods whose names follow from their numbers: those of a Job, or of the equal Jobs of a JobSet.

    Kubernetes itself sets JOB_COMPLETION_INDEX and the host name `<job>-<index>`. The facts about a
    JobSet are in labels of the pod, which its manifest must turn into variables. No label says how
    many pods there are, or what their subdomain is.
    """

    jobs: tuple[str, ...]
    own_job: int
    pods_of_job: int
    own_pod: int
    subdomain: str

    @classmethod
    def read(cls, num_workers: int | None, subdomain: str | None) -> _Numbering:
        own_pod = required_number(
            _INDEX,
            advice='Set `completionMode: "Indexed"` in the Job, or give `job_to_label_mapping`.',
        )
        if num_workers is None:
            num_workers = required_number(
                _NUM_WORKERS,
                advice="Set it to the number of pods in the Job's manifest, or give `num_workers`.",
            )
        jobset = os.environ.get("JOBSET_NAME")
        jobs, own_job = _jobs_of_set(jobset) if jobset else ((_own_job_name(own_pod),), 0)
        if num_workers < 1 or not jobs or num_workers % len(jobs):
            raise ClusterError(
                f"Every Job of a JobSet has the same number of workers; got {num_workers} "
                f"worker(s) for {len(jobs)} Job(s). Let the number of workers ({_NUM_WORKERS}) be "
                "that of all pods together."
            )
        numbering = cls(
            jobs,
            own_job,
            num_workers // len(jobs),
            own_pod,
            subdomain or _subdomain_of(jobset),
        )
        if own_job >= len(jobs) or own_pod >= numbering.pods_of_job:
            raise ClusterError(
                f"This is pod {own_pod} of Job {own_job}; there are {numbering.pods_of_job} "
                f"worker(s) in each of {len(jobs)} Job(s). Let the number of workers "
                f"({_NUM_WORKERS}) be that of all pods together."
            )
        return numbering

    @property
    def hosts(self) -> list[str]:
        return [
            f"{job}-{pod}.{self.subdomain}" for job in self.jobs for pod in range(self.pods_of_job)
        ]

    @property
    def own_index(self) -> int:
        return self.own_job * self.pods_of_job + self.own_pod


def _subdomain_of(jobset: str | None) -> str:
    if jobset and not os.environ.get(_SUBDOMAIN):
        return jobset  # the default of a JobSet, unless its manifest says otherwise
    return required(
        _SUBDOMAIN,
        advice="Set it to the `subdomain` of the Job's pods, the name of a headless service, or "
        "give `subdomain`.",
    )


def _jobs_of_set(jobset: str) -> tuple[tuple[str, ...], int]:
    """Return the names of a JobSet's Jobs that are like this one, and the index of this one."""
    advice = "Set it from the label {} of the pod, with a `fieldRef` in the manifest."
    kind = required(
        "REPLICATED_JOB_NAME", advice=advice.format("jobset.sigs.k8s.io/replicatedjob-name")
    )
    own_job = required_number("JOB_INDEX", advice=advice.format("jobset.sigs.k8s.io/job-index"))
    count = 1
    if "REPLICATED_JOB_REPLICAS" in os.environ:
        count = required_number(
            "REPLICATED_JOB_REPLICAS",
            advice=advice.format("jobset.sigs.k8s.io/replicatedjob-replicas"),
        )
    return tuple(f"{jobset}-{kind}-{index}" for index in range(count)), own_job


def _own_job_name(own_pod: int) -> str:
    advice = "Do not override the host name of the pod; in a JobSet, set JOBSET_NAME."
    host = required("HOSTNAME", advice=advice)
    job, dash, index = host.rpartition("-")
    if not job or not dash or as_index(index) != own_pod:
        raise ClusterError(
            f"The host name of pod {own_pod} of an indexed Job is '<job>-{own_pod}'; HOSTNAME is "
            f"{shown(host)}. {advice}"
        )
    return job


def _running(client: Any, job: str, selectors: Sequence[str]) -> list[str]:
    """Return the addresses of the pods of a job, by selector and then by name."""
    addresses: list[str] = []
    for selector in selectors:
        pods = client.list_pod_for_all_namespaces(label_selector=selector).items
        for pod in sorted(pods, key=lambda pod: pod.metadata.name):
            if pod.status.phase != "Running":
                raise ClusterError(
                    f"Every pod of job {job!r} must be running; pod {pod.metadata.name!r} is in "
                    f"phase {pod.status.phase!r}. Wait until it runs, or delete it."
                )
            addresses.append(_address(pod))
    if not addresses:
        raise ClusterError(
            f"Job {job!r} has no pods; the label selectors are {list(selectors)}. Check them with "
            "`kubectl get pods --all-namespaces --selector`."
        )
    return addresses


def _address(pod: Any) -> str:
    # The reference takes the node's address, at which pods can be reached only if they use the
    # node's network. In that case the two are the same.
    address = getattr(pod.status, "pod_ip", None)
    return address if isinstance(address, str) and address else pod.status.host_ip


def _default_client() -> object:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ClusterError(
            "Pods are found by their labels with the package `kubernetes`; it is not installed. "
            "Install it (`pip install kubernetes`), give `override_client`, or leave out "
            "`job_to_label_mapping` and give `num_workers`."
        ) from None
    if "KUBERNETES_SERVICE_HOST" in os.environ:  # Kubernetes sets it in every pod
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()
