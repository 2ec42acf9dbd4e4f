"""Checkpoints of another program: the latest of a directory, and those that are still to come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from replicax._seconds import require_seconds
from replicax.checkpoint import _files as files
from replicax.checkpoint._checkpoint import PathLike, local_path
from replicax.checkpoint._writing import under_way
from replicax.errors import InvalidType

_LOOK_SECONDS = 0.5  # how often a directory is looked at


def latest_checkpoint(directory: PathLike) -> str | None:
    """Return the path of the checkpoint that was saved last in a directory; None without one.

    It is one that `Checkpoint.save` or a manager has numbered, by whatever name; what this process
    still writes there is waited for. Several managers in one directory are told apart by their own
    `latest_checkpoint`.

    Args:
      directory: Where the checkpoints are.

    >>> import tempfile, replicax as rx
    >>> directory = tempfile.TemporaryDirectory()
    >>> rx.latest_checkpoint(directory.name)
    >>> path = rx.Checkpoint(epoch=3).save(f"{directory.name}/model")
    >>> rx.latest_checkpoint(directory.name) == path
    True
    >>> directory.cleanup()
    """
    place = local_path(directory)
    for writing in under_way(place):
        writing.news(None)
    found = files.latest(place)
    return None if found is None else str(found)


def checkpoints_iterator(
    directory: PathLike,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yield the latest checkpoint of a directory, and then each one that is the latest after it.

    For a program that evaluates while another one trains. A checkpoint that is followed by the next
    before it was asked for is passed over.

    Args:
      directory: Where the checkpoints are; it need not exist yet.
      min_interval_secs: The shortest time between two of them.
      timeout: How long to wait for the next one, in seconds; None or `math.inf` for as long as it
        takes.
      timeout_fn: Called when that is over. If it returns True, or is not given, the iterator ends;
        otherwise it goes on waiting.

    >>> import tempfile, replicax as rx
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = rx.Checkpoint(epoch=3).save(f"{directory}/model")
    ...     list(rx.checkpoints_iterator(directory, timeout=0)) == [path]
    True
    """
    place = local_path(directory)
    require_seconds("`min_interval_secs`", min_interval_secs, unlimited=False)
    if timeout is not None:
        require_seconds("`timeout`", timeout)
    if timeout_fn is not None and not callable(timeout_fn):
        raise InvalidType(f"`timeout_fn` must be a function; got {timeout_fn!r}.")
    # A generator of its own, so that arguments are checked now, and not by the first `next`.
    return _each(str(place), min_interval_secs, timeout, timeout_fn)


def _each(
    directory: str, interval: float, timeout: float | None, timeout_fn: Callable[[], bool] | None
) -> Iterator[str]:
    last: str | None = None
    while True:
        path = _next(directory, last, timeout)
        if path is not None:
            earliest = time.monotonic() + interval
            yield path
            last = path
            time.sleep(max(0.0, earliest - time.monotonic()))
        elif timeout_fn is None or timeout_fn():
            return


def _next(directory: str, last: str | None, timeout: float | None) -> str | None:
    """Return another checkpoint than the last one; None if there is none in time."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (path := latest_checkpoint(directory)) in (None, last):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(_LOOK_SECONDS, left))
    return path
