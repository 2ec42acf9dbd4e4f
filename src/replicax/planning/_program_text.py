"""The text of a program that XLA has compiled: its computations, and where they come from.

The format is not specified anywhere; tests/planning/test_program_text.py has samples of what JAX
0.10.2 and libtpu 0.0.42.1 write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=?]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([^\s(]+)\s+\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([^\s=]+)\s+=\s+(.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@final
@dataclass(frozen=True, slots=True)
class Array:
    """The type of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return (math.prod(self.shape) * bits(self.dtype) + 7) // 8


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A line of Python."""

    file: str
    number: int
    function: str


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation; `shape` and `attributes` are verbatim."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def stack(self) -> int:
        """The number of its innermost line of Python, or 0 if XLA does not give it."""
        return self.number(r"metadata=\{[^}]*?stack_frame_id=(\d+)") or 0

    def number(self, pattern: str) -> int | None:
        """Return the number that `pattern` finds in the attributes."""
        found = re.search(pattern, self.attributes)
        return int(found[1]) if found else None

    def word(self, pattern: str) -> str | None:
        """Return the word that `pattern` finds in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@final
@dataclass(frozen=True, slots=True)
class ProgramText:
    """A program, taken from its text.

    Args:
      computations: The instructions of each computation, by its name.
      entry: The name of the computation that is run.
      devices: The number of devices that it runs on.
      lines: The lines of Python by number, each with the number of its caller's line.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    devices: int
    lines: Mapping[int, tuple[Line, int]]

    def stack_of(self, instruction: Instruction) -> tuple[Line, ...]:
        """Return the lines of Python that an instruction comes from, innermost first."""
        found: list[Line] = []
        number = instruction.stack
        while number in self.lines and len(found) < len(self.lines):
            line, number = self.lines[number]
            found.append(line)
        return tuple(found)


def bits(dtype: str) -> int:
    """Return how many bits an element has.

    >>> from replicax.planning._program_text import bits
    >>> [bits(dtype) for dtype in ("f32", "bf16", "s4", "pred", "f8e4m3fn")]
    [32, 16, 4, 8, 8]
    """
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+?(\d+)", dtype)
    return int(found[1]) if found else 0


def arrays(shape: str) -> list[Array]:
    """Return the arrays of a shape, which may be a tuple."""
    return [
        Array(dtype, tuple(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(_COMMENT.sub("", shape))
    ]


def elements(shape: str) -> list[str]:
    """Return the shapes of the elements of a tuple; for an array, its own shape."""
    if not shape.startswith("("):
        return [shape]
    inner, found, depth, start = _COMMENT.sub("", shape[1:-1]), [], 0, 0
    for index, character in enumerate(inner):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            found.append(inner[start:index].strip())
            start = index + 1
    return [*found, inner[start:].strip()]


def parse(text: str) -> ProgramText:
    """Parse a program from the text that `jax.stages.Compiled.as_text` returns."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            found = _COMPUTATION.match(line)
            if found and not line.startswith("HloModule"):
                current = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif (instruction := _instruction(line)) is not None:
            current.append(instruction)
    header = text.partition("\n")[0]
    counts = [re.search(rf"{name}=(\d+)", header) for name in ("num_partitions", "replica_count")]
    devices = math.prod(int(found[1]) for found in counts if found)
    return ProgramText(computations, entry, devices, _lines(text))


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    name, rest = found[1], found[2]
    end = _end_of_shape(rest)
    opcode = re.match(r"\s*([a-z][a-z0-9-]*)\(", rest[end:])
    if not opcode:
        return None
    start = end + opcode.end()
    close = _closing(rest, start - 1)
    operands = tuple(re.findall(r"%([^\s,()]+)", rest[start:close]))
    if not operands and opcode[1] == "constant":
        operands = (rest[start:close],)
    return Instruction(name, rest[:end], opcode[1], operands, rest[close + 1 :])


def _end_of_shape(text: str) -> int:
    if text.startswith("("):
        return _closing(text, 0) + 1
    found = re.match(r"[a-z0-9]+\[[^\]]*\](?:\{[^}]*\})?", text)
    return found.end() if found else text.find(" ")


def _closing(text: str, opening: int) -> int:
    """Return the index at which the parenthesis at `opening` is closed."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    return len(text)


def _lines(text: str) -> dict[int, tuple[Line, int]]:
    """Return the tables at the head of a program, as lines of Python."""
    files, functions = _strings(text, "FileNames"), _strings(text, "FunctionNames")
    locations = {number: _numbers(row) for number, row in _rows(text, "FileLocations")}
    frames = {number: _numbers(row) for number, row in _rows(text, "StackFrames")}
    # In some texts the ids of parents are one too high; frame 1 then seems to be its own parent.
    shift = 1 if frames.get(1, {}).get("parent_frame_id", 0) == 1 else 0
    lines: dict[int, tuple[Line, int]] = {}
    for number, frame in frames.items():
        place = locations.get(frame.get("file_location_id", 0), {})
        line = Line(
            files.get(place.get("file_name_id", 0), ""),
            place.get("line", 0),
            functions.get(place.get("function_name_id", 0), ""),
        )
        lines[number] = (line, frame.get("parent_frame_id", 0) - shift)
    return lines


def _rows(text: str, title: str) -> Iterator[tuple[int, str]]:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    for row in found[1].splitlines() if found else ():
        number, _, rest = row.partition(" ")
        yield int(number), rest


def _strings(text: str, title: str) -> dict[int, str]:
    return {number: row.strip()[1:-1] for number, row in _rows(text, title)}


def _numbers(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", row)}
