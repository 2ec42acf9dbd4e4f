"""A filter that keeps a C++ library's writes to stdout out of the program's output."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def without_lines(start: bytes) -> Iterator[None]:
    """Drop the lines on stdout that begin with `start`; the rest is written at the end.

    In each process and for each device, Gloo prints on stdout how many connections it made.
    """
    sys.stdout.flush()
    try:
        usual = os.dup(1)
    except OSError:  # there is no stdout
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(usual, 1)
            os.close(usual)
            caught.seek(0)
            rest = b"".join(line for line in caught if not line.startswith(start))
            if rest:
                os.write(1, rest)
