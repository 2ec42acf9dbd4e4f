"""What happens when a program is told to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from replicax._seconds import require_seconds
from replicax.errors import InvalidType


@final
@dataclass(frozen=True, slots=True)
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` learns that a machine is taken away, and what it does.

    Args:
      termination_watcher_fn: Called about once per second, in a thread, until it returns True: this
        machine is about to be taken away. It should not block. By default the handler waits for
        SIGTERM; with a function, it leaves that alone.
      exit_fn: Called on every worker when the checkpoint is complete. By default `sys.exit(143)`,
        after which `replicax launch --max-restarts`, and schedulers that restart what has failed,
        start the workers again. If it returns, training goes on, and nothing is saved again.
      grace_period: For how many seconds training goes on after the news; then it is saved. Leave
        time for saving. By default, and with 0, it is saved after the step that is under way.
      save_fn: Called in place of `CheckpointManager.save`, on every worker, with the arguments of
        `save_checkpoint_if_preempted`.

    >>> import replicax as rx
    >>> rx.experimental.TerminationConfig(grace_period=30).grace_period
    30
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise InvalidType(f"`{name}` must be a function; got {function!r}.")
        if self.grace_period is not None:
            # Without a limit nothing would ever be saved.
            require_seconds("`grace_period`", self.grace_period, unlimited=False)
