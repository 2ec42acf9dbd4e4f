"""The output of workers, made harmless for a terminal."""

from __future__ import annotations

import re

_PLAIN = "\x1b[0m"
# Each alternative ends at the next ESC, so that no line takes quadratic time.
_CONTROL = re.compile(
    "(?P<colour>\x1b\\[[0-9;:]*m)"
    "|\x1b\\[[0-?]*[ -/]*[@-~]"  # moves the cursor, erases, sets modes
    "|\x1b[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)"  # sets titles, links, the clipboard
    "|\x1b[ -/]*[0-Z\\\\`-~]"  # resets, selects character sets
    # The remains of incomplete sequences; and bytes that some terminals take for control sequences,
    # which are C1 controls in valid UTF-8, and surrogates elsewhere.
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udc9f]"
)


def harmless(line: bytes, *, colours: bool = True) -> bytes:
    r"""Return a line without control sequences, except colours, which are reset at its end.

    Control characters that belong to no sequence are spelled out.

    >>> from replicax.launch._escapes import harmless
    >>> harmless(b"\x1b]0;title\x07\x1b[31mred\x1b[2J\a")
    b'\x1b[31mred\\x07\x1b[0m'
    """
    text = line.decode(errors="surrogateescape")
    coloured = False

    def replace(found: re.Match[str]) -> str:
        nonlocal coloured
        if found["colour"] and colours:
            coloured = True
            return found[0]
        return "" if len(found[0]) > 1 else f"\\x{ord(found[0]) & 0xFF:02x}"

    text = _CONTROL.sub(replace, text)
    return (text + (_PLAIN if coloured else "")).encode(errors="surrogateescape")
