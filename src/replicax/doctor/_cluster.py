"""Which resolvers find a cluster in the environment, and what they say of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from replicax.cluster import (
    ClusterResolver,
    KubernetesClusterResolver,
    Members,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from replicax.doctor._check import Check, note, ok, problem
from replicax.errors import ClusterError


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    """A resolver, and the variables that tell whether there is something for it to find.

    Args:
      name: What it is called in `rx.cluster_resolver`.
      signs: Environment variables; one is enough.
      make: Makes it.
      names_come_later: Whether the names of workers mean something only when they have started.
    """

    name: str
    signs: tuple[str, ...]
    make: Callable[[], ClusterResolver]
    names_come_later: bool = False

    @property
    def sign(self) -> str | None:
        return next((name for name in self.signs if name in os.environ), None)


# The first is what strategies use by themselves; the others are given to them.
_CANDIDATES = (
    _Candidate("TFConfigClusterResolver", ("TF_CONFIG",), TFConfigClusterResolver),
    _Candidate(
        "SlurmClusterResolver",
        ("SLURM_PROCID",),
        lambda: SlurmClusterResolver(auto_set_gpu=False),  # looking must change nothing
    ),
    _Candidate(
        "KubernetesClusterResolver",
        ("JOB_COMPLETION_INDEX", "JOBSET_NAME"),
        KubernetesClusterResolver,
        names_come_later=True,
    ),
)


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """What was found.

    Args:
      checks: The lines of the report.
      members: Who takes part; None if nobody but this process, or if that is not known.
      names_come_later: Whether the names of workers mean something only when they have started.
    """

    checks: tuple[Check, ...]
    members: Members | None = None
    names_come_later: bool = False


def find_cluster() -> Cluster:
    """What the first resolver says that finds something; the others are named."""
    found = [candidate for candidate in _CANDIDATES if candidate.sign is not None]
    if not found:
        return Cluster((ok("resolver", "none: runs as one worker"),))
    first, *others = found
    checks = [ok("resolver", f"{first.name}, because {first.sign} is set")]
    if first is not _CANDIDATES[0]:
        checks.append(
            note(
                "used if given",
                "strategies look at TF_CONFIG only",
                "Write `rx.MultiWorkerMirroredStrategy"
                f"(cluster_resolver=rx.cluster_resolver.{first.name}())`.",
            )
        )
    checks += [
        note("not asked", f"{other.name}, though {other.sign} is set", "It is used if given.")
        for other in others
    ]
    members, said = _ask(first)
    return Cluster((*checks, *said), members, first.names_come_later)


def _ask(candidate: _Candidate) -> tuple[Members | None, Sequence[Check]]:
    try:
        resolver = candidate.make()
        members = Members.of(resolver)
        if members is None:
            task = f"{resolver.task_type or 'a task'} {resolver.task_id or 0}"
            return None, [ok("cluster", f"this is {task}, which runs as one worker")]
    except ClusterError as error:  # says what to do, as all of our errors do
        return None, [problem("cluster", str(error), _consequence(candidate))]
    except Exception as error:  # of the client of Kubernetes, which has many
        return None, [
            problem(
                "cluster",
                f"{candidate.name} failed: {type(error).__name__}: {error}",
                "See docs/clusters.md for what it needs.",
            )
        ]
    return members, [
        ok("cluster", f"{members.count} workers, of which this is {members.name}"),
        *(
            ok(name, str(address))
            for name, address in zip(members.names, members.addresses, strict=True)
        ),
    ]


def _consequence(candidate: _Candidate) -> str:
    if candidate is _CANDIDATES[0]:
        return "Until that is right, no `rx.MultiWorkerMirroredStrategy` can be made."
    return f"If this process is to work alone, do not give a strategy the {candidate.name}."
