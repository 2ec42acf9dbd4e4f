"""Pages in a real browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A page in a browser, by https://chromedevtools.github.io/devtools-protocol over two pipes."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        arguments = [
            BROWSER,
            "--headless",
            "--no-sandbox",  # the sandbox has no use here, and does not start in containers
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",  # reads from file 3, writes to file 4
            f"--user-data-dir={profile}",
        ]
        # A shell, because the two pipes may have the numbers 3 and 4 the other way round.
        ends = f"exec {shlex.join(arguments)} 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null"
        self._process = subprocess.Popen(
            ["bash", "-c", ends], pass_fds=(theirs_in, theirs_out), start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._messages = os.fdopen(self._in, "rb")
        self._count = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # which ends it
        self._messages.close()
        try:
            self._process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def open(self, address: str, size: tuple[int, int], *, dark: bool = False) -> None:
        """Show a page, and wait until it is complete."""
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        for _ in range(600):
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"{expression} was not true for 30 seconds")

    def screenshot(self, picture: Path) -> None:
        """Write what is seen to a PNG."""
        picture.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer: dict[str, Any] = {}
        while answer.get("id") != self._count:  # events come in between
            answer = json.loads(self._next_message())
        assert "error" not in answer, answer
        return answer["result"]

    def _next_message(self) -> bytes:
        message = bytearray()
        while (byte := self._messages.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)


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
