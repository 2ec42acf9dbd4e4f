"""Saving and ending training when one of its machines is about to be preempted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

from replicax import cluster, preemption
from replicax._rank_zero import is_first_worker
from replicax._typing import Nest
from replicax.checkpoint import Checkpoint, CheckpointManager, require_outside
from replicax.errors import ContextError, InvalidArgument, InvalidType
from replicax.termination._config import TerminationConfig
from replicax.termination._watching import Watcher

Result = TypeVar("Result")

# The exit code that shells report for a process ended by SIGTERM. Schedulers that distinguish
# errors worth retrying from others count it among the former.
_EXIT_CODE = 143


@final
class PreemptionCheckpointHandler:
    """A handler that saves and ends training, on all workers at one step, when one is preempted.

    Machines that can be preempted give notice, usually by SIGTERM. When one of the workers gets it,
    all of them save after the same step, and exit. When the program is started again, constructing
    the handler restores the latest checkpoint.

    Construct it on every worker, in the main thread, after the strategy and the objects of the
    checkpoint.

    Args:
      cluster_resolver: The resolver of the strategy, `strategy.cluster_resolver`; None for one
        process.
      checkpoint_or_checkpoint_manager: The checkpoint to save, or its manager.
      checkpoint_dir: The directory in which a checkpoint is saved and looked for; a manager has its
        own. It is for the handler alone, which keeps one checkpoint there.
      termination_config: What to wait for instead of SIGTERM, how to save, and how to end.

    >>> import tempfile, replicax as rx
    >>> directory = tempfile.TemporaryDirectory()
    >>> steps = rx.Variable(0)
    >>> handler = rx.experimental.PreemptionCheckpointHandler(
    ...     None, rx.Checkpoint(steps=steps), directory.name)
    >>> while int(steps) < 3:
    ...     _ = handler.run(lambda: steps.assign_add(1))
    >>> handler.total_run_calls
    3
    >>> directory.cleanup()
    """

    def __init__(
        self,
        cluster_resolver: cluster.ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: Any = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        config = TerminationConfig() if termination_config is None else termination_config
        if not isinstance(config, TerminationConfig):
            raise InvalidType(
                "`termination_config` must be an `rx.experimental.TerminationConfig`; got "
                f"{termination_config!r}."
            )
        _require_workers(cluster_resolver)
        self._config = config
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir, config)
        self._checkpoint = (
            checkpoint_or_checkpoint_manager
            if isinstance(checkpoint_or_checkpoint_manager, Checkpoint)
            else checkpoint_or_checkpoint_manager.checkpoint
        )
        self._ended = False
        if config.termination_watcher_fn is None:
            preemption.received_at()  # installed now, to miss no signal while state is restored
            self._told_at = preemption.received_at
        else:
            self._told_at = Watcher(config.termination_watcher_fn).told_at
        if self._manager is not None:
            self._manager.restore_or_initialize()

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run`, including those before the program was restarted."""
        return self._checkpoint._run_calls

    def run(
        self, distributed_train_function: Callable[..., Result], *args: Nest, **kwargs: Nest
    ) -> Result:
        """Call a function that trains for one or more steps; then save and exit if that is due.

        All workers must call it equally often. The state is saved after the function, so count
        steps inside it, in a variable of the checkpoint, or by `total_run_calls`.

        Args:
          distributed_train_function: The function, usually an `rx.function` that calls
            `strategy.run`.
          *args: Arguments for the function.
          **kwargs: Keyword arguments for the function.
        """
        require_outside("run", "a `PreemptionCheckpointHandler`")
        if not callable(distributed_train_function):
            raise InvalidType(
                "`distributed_train_function` must be a function; got "
                f"{distributed_train_function!r}."
            )
        result = distributed_train_function(*args, **kwargs)
        self._checkpoint._count_run_call()
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Save and exit if a worker was asked to and its grace period is over.

        Use it instead of `run` in loops that do not call a single function. All workers must call
        it equally often, where the state can be saved.

        Args:
          *args: Arguments for `CheckpointManager.save`, or `save_fn`. By default, the manager saves
            even if its `checkpoint_interval` is not over.
          **kwargs: Keyword arguments for the same function.
        """
        require_outside("save_checkpoint_if_preempted", "a `PreemptionCheckpointHandler`")
        if self._ended or not preemption.agreed(self._must_stop()):
            return
        saved = self._save(*args, **kwargs)
        self._ended = True
        if is_first_worker():
            what = saved if isinstance(saved, str) else "the state"
            print(
                f"replicax: a worker was told to end; {what} was saved, and all workers end now.",
                file=sys.stderr,
                flush=True,
            )
        if self._config.exit_fn is None:
            sys.exit(_EXIT_CODE)
        self._config.exit_fn()

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Save and end after a block of code, if that is due.

        It calls `save_checkpoint_if_preempted()` at the end of the block, unless the block raises.
        Put one step or a few into a block, not the whole training.
        """
        yield
        self.save_checkpoint_if_preempted()

    def _must_stop(self) -> bool:
        """Tell whether this worker has been given notice and its grace period is over."""
        told_at = self._told_at()
        grace = self._config.grace_period or 0.0
        return told_at is not None and time.monotonic() - told_at >= grace

    def _save(self, *args: Nest, **kwargs: Nest) -> Any:
        if self._config.save_fn is not None:
            return self._config.save_fn(*args, **kwargs)
        assert self._manager is not None
        if len(args) < 2:
            kwargs = {"check_interval": False, **kwargs}
        saved = self._manager.save(*args, **kwargs)
        self._manager.sync()
        return saved


def _manager(given: Any, directory: Any, config: TerminationConfig) -> CheckpointManager | None:
    """Return the manager that saves and restores, or None if `save_fn` saves."""
    if isinstance(given, CheckpointManager):
        if directory is not None:
            raise InvalidArgument(
                f"`checkpoint_dir` is for an `rx.Checkpoint`; got {directory!r} with a manager, "
                f"which saves to {given.directory}. Leave it out."
            )
        return given
    if not isinstance(given, Checkpoint):
        raise InvalidType(
            "A `PreemptionCheckpointHandler` saves an `rx.Checkpoint` or an "
            f"`rx.CheckpointManager`; got {given!r}."
        )
    if directory is not None:
        return CheckpointManager(given, directory, max_to_keep=1)
    if config.save_fn is None:
        raise InvalidArgument(
            "An `rx.Checkpoint` needs a `checkpoint_dir` to be saved to; got None. Give one, or an "
            "`rx.CheckpointManager`."
        )
    return None


def _require_workers(resolver: object) -> None:
    """Raise if there are other workers and this process has not connected to them yet."""
    if resolver is None or cluster.session() is not None:
        return
    if not isinstance(resolver, cluster.ClusterResolver):
        raise InvalidType(
            f"`cluster_resolver` must be one of `rx.cluster_resolver`, or None; got {resolver!r}."
        )
    members = cluster.Members.of(resolver)
    if members is not None:
        raise ContextError(
            f"The cluster has {members.count} workers, and this process has not met the others. "
            "Make the `rx.MultiWorkerMirroredStrategy` before the handler."
        )
