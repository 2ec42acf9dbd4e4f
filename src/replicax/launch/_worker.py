"""One worker: its main process and that one's children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, final

# Only another process can act when the launcher is killed by SIGKILL. So each worker is put into
# the process group of a shell that waits for a pipe to the launcher to close, and then kills the
# group. Unlike Linux's PR_SET_PDEATHSIG, this reaches the processes that a worker has started, such
# as those that read data; it works on any POSIX system; and there is no moment at which a worker
# runs unguarded. It costs 1 ms and 1 MB per worker.
_KEEPER = "trap '' HUP INT QUIT TERM TSTP TTIN TTOU; read -r nothing; kill -KILL 0"


@final
class Worker:
    """A running worker."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # one pipe, so that lines keep their order
                process_group=self._keeper.pid,
            )
        except BaseException:
            self._end_group()
            raise
        self.started = time.monotonic()

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, number: signal.Signals) -> None:
        """Signal the worker; SIGKILL goes to all its processes, anything else to the main one only.

        The other processes are the worker's to end: it may need those that read data in order to
        save a checkpoint.
        """
        if number is signal.SIGKILL:
            self._kill_group()
            self.process.kill()  # in case it has left the group
        else:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)  # a stopped process does not act on signals

    def close(self) -> None:
        """Kill the worker's remaining processes."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._end_group()

    def _kill_group(self) -> None:
        if self._keeper.returncode is None:  # not yet reaped, so no other process has its id
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all ended, or about to
                os.killpg(self._keeper.pid, signal.SIGKILL)

    def _end_group(self) -> None:
        self._kill_group()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
