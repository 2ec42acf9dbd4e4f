"""The process that keeps one node of Ray: it ends the node when its owner has ended, however.

It runs as a script by itself, with the standard library only. The owner holds the other end of its
standard input, so even an owner that is killed is noticed at once.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

_REMOVING_SECONDS = 10.0
_LAST_BYTES = 4000  # less than a pipe takes without a reader


def _end_with_the_owner(node: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    # Ray's own processes end with the one that started them: see `ray start --block`.
    os.killpg(node.pid, signal.SIGKILL)


def _remove(folder: str) -> None:
    """Remove a folder that processes which are just ending may still write to."""
    deadline = time.monotonic() + _REMOVING_SECONDS
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def main(folder: str, command: list[str]) -> int:
    """Run a node until it or its owner ends; print how its log ends, and remove its folder."""
    log = os.path.join(folder, "node.log")
    with open(log, "wb") as output:
        node = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=_end_with_the_owner, args=(node,), daemon=True).start()
    code = node.wait()
    with open(log, "rb") as output, contextlib.suppress(OSError):  # the reader may have ended
        sys.stdout.buffer.write(output.read()[-_LAST_BYTES:])
        sys.stdout.flush()
    _remove(folder)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
