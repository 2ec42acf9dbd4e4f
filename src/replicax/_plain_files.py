"""Opening files that must be regular files."""

from __future__ import annotations

import errno
import os
import stat


def open_plain(path: str | os.PathLike[str], flags: int, *, dir_fd: int | None = None) -> int:
    """Return a descriptor of a regular file; raise an OSError for anything else.

    Opening a FIFO would wait until another process opens its other end, perhaps forever.

    Args:
      path: The file.
      flags: The flags for `os.open`.
      dir_fd: A descriptor of the directory that a relative path starts from.
    """
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
