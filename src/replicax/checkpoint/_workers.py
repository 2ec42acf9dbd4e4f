"""The exchange between workers about a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from replicax import cluster
from replicax.errors import CheckpointError

if TYPE_CHECKING:
    from replicax._typing import Json

Result = TypeVar("Result")

# What the messages about a lost or stuck worker say it was doing.
SAVING, RESTORING = "saving a checkpoint", "restoring a checkpoint"


def all_gather(label: str, value: object = None) -> list[Json]:
    """Return the values of all workers; in a single process, only its own."""
    session = cluster.session()
    return [value] if session is None else session.all_gather(label, value)


def this_worker() -> int:
    session = cluster.session()
    return 0 if session is None else session.members.index


def worker_count() -> int:
    session = cluster.session()
    return 1 if session is None else session.members.count


def worker_name(worker: int) -> str:
    session = cluster.session()
    return "this process" if session is None else session.members.names[worker]


def has_ended(worker: int) -> bool:
    """Return whether it is known that a worker takes no part any more."""
    session = cluster.session()
    return session is not None and session.has_ended(worker)


def on_all_workers(what: str, action: Callable[[], Result], label: str = RESTORING) -> Result:
    """Call `action` and return its result; if it fails on one worker, raise on all of them."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = all_gather(label, failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for worker, text in enumerate(outcomes):
        if text is not None:
            error = CheckpointError(
                f"{worker_name(worker)} could not {what}, so that no worker has: "
                f"{text.removesuffix('.')}. All workers must see the same directory."
            )
            error.follows_another = True
            raise error
    return cast(Result, result)
