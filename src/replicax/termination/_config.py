"""The settings for preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from replicax._seconds import require_seconds
from replicax.errors import InvalidType


@final
@dataclass(frozen=True, slots=True)
class TerminationConfig:
    """The way a `PreemptionCheckpointHandler` detects and handles preemption.

    Args:
      termination_watcher_fn: Called about once per second, in a thread, until it returns True,
        which means that this machine is about to be preempted. It should not block. By default the
        handler waits for SIGTERM; with a function, it leaves that signal alone.
      exit_fn: Called on every worker when the checkpoint is complete. By default `sys.exit(143)`,
        after which `replicax launch --max-restarts`, and schedulers that restart failed jobs,
        start the workers again. If it returns, training continues, and nothing is saved again.
      grace_period: The number of seconds for which training continues after the notice, before it
        is saved. Leave time for saving. By default, or with 0, it is saved after the current step.
      save_fn: Called in place of `CheckpointManager.save`, on every worker, with the arguments of
        `save_checkpoint_if_preempted`.

    >>> import replicax as rx
    >>> rx.experimental.TerminationConfig(grace_period=30).grace_period
    30
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise InvalidType(f"`{name}` must be a function; got {function!r}.")
        if self.grace_period is not None:
            # Without a limit nothing would ever be saved.
            require_seconds("`grace_period`", self.grace_period, unlimited=False)
