"""Checkpoints of another program: the latest in a directory, and those that are still to come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from replicax._seconds import require_seconds
from replicax.checkpoint import _files as files
from replicax.checkpoint._checkpoint import PathLike, local_path
from replicax.checkpoint._writer_thread import under_way
from replicax.errors import InvalidType

_LOOK_SECONDS = 0.5  # between two looks at a directory


def latest_checkpoint(directory: PathLike) -> str | None:
    """Return the path of the last checkpoint saved in a directory, or None if there is none.

    This considers checkpoints numbered by `Checkpoint.save` or a manager, under any name, and
    awaits one that this process is still writing there. With several managers in one directory, use
    their own `latest_checkpoint`.

    Args:
      directory: The directory of the checkpoints.

    >>> import tempfile, replicax as rx
    >>> directory = tempfile.TemporaryDirectory()
    >>> rx.latest_checkpoint(directory.name)
    >>> path = rx.Checkpoint(epoch=3).save(f"{directory.name}/model")
    >>> rx.latest_checkpoint(directory.name) == path
    True
    >>> directory.cleanup()
    """
    place = local_path(directory)
    for writer in under_way(place):
        writer.news(None)
    found = files.latest(place)
    return None if found is None else str(found)


def checkpoints_iterator(
    directory: PathLike,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yield the latest checkpoint of a directory, and then each later one.

    This is for a program that evaluates while another one trains. A checkpoint is skipped if the
    next one is complete before it is asked for.

    Args:
      directory: The directory of the checkpoints; it need not exist yet.
      min_interval_secs: The shortest time between two checkpoints.
      timeout: The longest wait for the next one, in seconds; None or `math.inf` for no limit.
      timeout_fn: Called after such a wait. If it returns True, or is not given, the iterator ends;
        otherwise it waits again.

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
    # The generator is separate so that arguments are checked now, and not by the first `next`.
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
    """Wait for a checkpoint other than the last one; return None if there is none in time."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (path := latest_checkpoint(directory)) in (None, last):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(_LOOK_SECONDS, left))
    return path
