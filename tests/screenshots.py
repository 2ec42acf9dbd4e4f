"""Screenshots of pages in a real browser."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def screenshot(page: Path, picture: Path, size: tuple[int, int], *, dark: bool = False) -> None:
    """Have the browser draw a page."""
    assert BROWSER is not None
    profile = picture.with_suffix(".profile")
    subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",  # the sandbox has no use here, and does not start in containers
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def colours(picture: Path) -> Counter[str]:
    """Count the pixels of a PNG by colour, such as "#2f6fb5"."""
    content = picture.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", content[16:26])
    assert depth == 8
    size = {2: 3, 6: 4}[kind]
    chunks, place = b"", 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        if content[place + 4 : place + 8] == b"IDAT":
            chunks += content[place + 8 : place + 8 + length]
        place += length + 12
    rows, found = zlib.decompress(chunks), Counter()
    stride, above = width * size, bytearray(width * size)
    for row in range(height):
        start = row * (stride + 1)
        line = bytearray(rows[start + 1 : start + 1 + stride])
        _unfilter(rows[start], line, above, size)
        found.update(line[at : at + 3].hex() for at in range(0, stride, size))
        above = line
    return Counter({f"#{colour}": count for colour, count in found.items()})


def _unfilter(kind: int, line: bytearray, above: bytearray, size: int) -> None:
    """Undo the filter of a row of a PNG, by https://www.w3.org/TR/png-3/#9Filters."""
    for at in range(len(line)):
        left = line[at - size] if at >= size else 0
        corner = above[at - size] if at >= size else 0
        up = above[at]
        if kind == 1:
            line[at] = (line[at] + left) % 256
        elif kind == 2:
            line[at] = (line[at] + up) % 256
        elif kind == 3:
            line[at] = (line[at] + (left + up) // 2) % 256
        elif kind == 4:
            guess = left + up - corner
            near = min((left, up, corner), key=lambda value: abs(guess - value))
            line[at] = (line[at] + near) % 256
