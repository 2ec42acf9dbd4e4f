"""The environment in which a cluster is found, and its resolver's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from replicax._environments import ENVIRONMENTS
from replicax.cluster import ClusterResolver, Members
from replicax.doctor._check import Check, note, ok, problem
from replicax.errors import ClusterError


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """The findings on the cluster.

    Args:
      checks: The lines of the report.
      members: The processes that take part; None if only this one does, or if that is unknown.
      names_come_later: Whether the names of workers resolve only once the workers have started.
    """

    checks: tuple[Check, ...]
    members: Members | None = None
    names_come_later: bool = False


def find_cluster() -> Cluster:
    """Report the answers of the default resolver, and name the others."""
    seen = [environment for environment in ENVIRONMENTS if environment._signs.present]
    here = [environment for environment in seen if not environment._signs.missing]
    others = [
        _passed_over(environment, here) for environment in seen if environment not in here[:1]
    ]
    if not here:
        return Cluster((ok("resolver", "none: runs as one worker"), *others))
    first = here[0]
    found = ok("resolver", f"{first.__name__}, because {_are_set(first._signs.present)}")
    members, said = _ask(first)
    return Cluster((found, *others, *said), members, first._signs.names_come_later)


def _passed_over(environment: type[ClusterResolver], here: list[type[ClusterResolver]]) -> Check:
    signs, name = environment._signs, environment.__name__
    if environment in here:
        return note(
            "not asked",
            f"{name}, though {_are_set(signs.present)}",
            f"{here[0].__name__} comes first. The other is used if given: "
            f"`cluster_resolver=rx.cluster_resolver.{name}()`.",
        )
    missing = " and ".join(signs.missing)
    return note(
        "not asked",
        f"{name}: {_are_set(signs.present)}, but not {missing}",
        f"If several processes are to work together, set {missing} too; see docs/clusters.md.",
    )


def _are_set(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set"


def _ask(environment: type[ClusterResolver]) -> tuple[Members | None, Sequence[Check]]:
    try:
        resolver = environment(**environment._signs.to_look)
        members = Members.of(resolver)
        if members is None:
            task = f"{resolver.task_type or 'a task'} {resolver.task_id or 0}"
            return None, [ok("cluster", f"this is {task}, which runs as one worker")]
    except ClusterError as error:  # says what to do, as all of our errors do
        consequence = "Until that is right, no `rx.MultiWorkerMirroredStrategy()` can be made."
        return None, [problem("cluster", str(error), consequence)]
    except Exception as error:  # The client of Kubernetes raises many kinds.
        return None, [
            problem(
                "cluster",
                f"{environment.__name__} failed: {type(error).__name__}: {error}",
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
