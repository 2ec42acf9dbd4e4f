"""The collectives of a compiled program, and the user's lines that caused them."""

from __future__ import annotations

import math
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import final

from replicax.planning._program_text import (
    Array,
    Instruction,
    Line,
    ProgramText,
    arrays,
    elements,
)

_KINDS = (
    "ragged-all-to-all",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HLO_CALLS = ("fusion", "call", "async-start", "call-start", "fusion-start")

_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/(?:jax|jaxlib|optax|chex|flax|keras|equinox)/")


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """A line of the user's code, and how many of a collective's bytes it accounts for."""

    file: str
    line: int
    function: str
    bytes: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.file else "not known"


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation across several chips.

    Args:
      kind: XLA's name for it: "all-reduce", "all-gather", "reduce-scatter" and so on.
      bytes: The size of the whole result on one chip: the sum, or everything gathered.
      group_size: The number of chips in a group.
      groups: The number of groups that run it at the same time.
      times: The number of runs per step, which may be more than one in a loop.
      origins: The lines that caused it; XLA may combine several collectives into one.
      exact: False if `times` could not be determined because of a loop or a condition.
    """

    kind: str
    bytes: int
    group_size: int
    groups: int
    times: int = 1
    origins: tuple[Origin, ...] = ()
    exact: bool = True

    @property
    def sent_bytes(self) -> float:
        """The bytes that one chip sends per step, if the collective runs over a ring."""
        share = (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            share *= 2
        elif self.kind in ("collective-permute", "collective-broadcast"):
            share = 1.0
        return share * self.bytes * self.times


def find_collectives(program: ProgramText) -> tuple[Collective, ...]:
    """Return the collectives among more than one device, in the order of the program."""
    return tuple(each for each in _Search(program).run() if each.group_size > 1)


@final
class _Search:
    """A search for the collectives of a program."""

    def __init__(self, program: ProgramText) -> None:
        self._program = program
        self._found: list[Collective] = []
        self._chains: set[tuple[str, str]] = set()

    def run(self) -> list[Collective]:
        self._visit(self._program.entry, 1, True, None)
        return self._found

    def _visit(self, name: str, times: int, exact: bool, caller: Instruction | None) -> None:
        for instruction in self._program.computations.get(name, ()):
            kind = next((k for k in _KINDS if instruction.opcode in (k, f"{k}-start")), None)
            if kind is not None and self._is_new(kind, instruction):
                self._found.append(self._collective(name, instruction, kind, times, exact, caller))
            if instruction.opcode == "while":
                body, rounds = instruction.word(r"body=%?([^\s,]+)"), self._rounds(instruction)
                self._visit(body or "", times * (rounds or 1), exact and rounds is not None, None)
            elif instruction.opcode == "conditional":
                for branch in _branches(instruction):
                    self._visit(branch, times, False, None)
            elif instruction.opcode in _HLO_CALLS:
                called = instruction.word(r"(?:calls|to_apply|called_computation)=%?([^\s,]+)")
                self._visit(called or "", times, exact, instruction)

    def _is_new(self, kind: str, instruction: Instruction) -> bool:
        """Return False for a further piece of a known collective: a v5e has some in pieces."""
        chain = instruction.word(r'chain_id="([^"]*)"')
        if chain is None:
            return True
        is_new = (kind, chain) not in self._chains
        self._chains.add((kind, chain))
        return is_new

    def _collective(
        self,
        computation: str,
        instruction: Instruction,
        kind: str,
        times: int,
        exact: bool,
        caller: Instruction | None,
    ) -> Collective:
        shape = instruction.shape
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            operands, *results = elements(shape)
            shape = results[0] if results else operands
        size, count = _groups(instruction.attributes, self._program.devices)
        scale = size if kind == "reduce-scatter" else 1  # the shape is that of one chip's share
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # the name of a TPU's fusion of all-reduce and dynamic-slice
        parts = arrays(shape)
        return Collective(
            kind,
            sum(part.bytes for part in parts) * scale,
            size,
            count,
            times,
            self._origins(computation, instruction, parts, scale, caller),
            exact,
        )

    def _origins(
        self,
        computation: str,
        instruction: Instruction,
        parts: list[Array],
        scale: int,
        caller: Instruction | None,
    ) -> tuple[Origin, ...]:
        teller = instruction
        if not instruction.stack and caller is not None and caller.stack:
            teller = caller
        tellers = self._tellers_of_parts(computation, instruction)
        found: dict[tuple[str, int, str], int] = {}
        for index, part in enumerate(parts):
            line = user_line(self._program.stack_of(tellers.get(index, teller)))
            key = (line.file, line.number, line.function)
            found[key] = found.get(key, 0) + part.bytes * scale
        return tuple(Origin(*key, count) for key, count in found.items())

    def _tellers_of_parts(
        self, computation: str, instruction: Instruction
    ) -> dict[int, Instruction]:
        """Return the operations that unpack a combined collective; they carry the source lines."""
        instructions = self._program.computations[computation]
        names = {instruction.name}
        if instruction.opcode.endswith("-start"):
            done = f"{instruction.opcode.removesuffix('start')}done"
            names |= {
                other.name
                for other in instructions
                if other.opcode == done and instruction.name in other.operands
            }
        return {
            other.number(r"index=(\d+)") or 0: other
            for other in instructions
            if other.opcode == "get-tuple-element" and other.stack and names & {*other.operands}
        }

    def _rounds(self, loop: Instruction) -> int | None:
        """Return how often a loop runs, if known: a `scan` counts from 0 up to a constant."""
        given = loop.number(r'known_trip_count"?[=:]\s*\{\s*"?n"?\s*[=:]\s*"?(\d+)')
        if given is not None:
            return given
        name = loop.word(r"condition=%?([^\s,]+)")
        condition = self._program.computations.get(name or "", ())
        limits = [
            int(each.operands[0])
            for each in condition
            if each.opcode == "constant" and re.fullmatch(r"\d+", each.operands[0])
        ]
        tests = [
            each
            for each in condition
            if each.opcode == "compare"
            or (each.opcode == "fusion" and each.shape.startswith("pred[]"))
        ]
        if len(limits) != 1 or len(tests) != 1:
            return None
        is_less = tests[0].opcode == "fusion" or "direction=LT" in tests[0].attributes
        return limits[0] if is_less else None


def user_line(stack: tuple[Line, ...]) -> Line:
    """Return the innermost line outside of libraries, or an empty line if there is none."""
    return next((line for line in stack if not _is_library(line.file)), Line("", 0, ""))


def _is_library(file: str) -> bool:
    if file.startswith(f"{_OURS}/") or _LIBRARY.search(file):
        return True
    return file.startswith((f"{_STANDARD}/", "<frozen")) and "-packages/" not in file


def _branches(instruction: Instruction) -> list[str]:
    listed = re.findall(
        r"(?:branch_computations|(?:true|false)_computation)=(\{[^}]*\}|%[^\s,]+)",
        instruction.attributes,
    )
    return re.findall(r"%([^\s,{}]+)", " ".join(listed))


def _groups(attributes: str, devices: int) -> tuple[int, int]:
    """Return how many chips take part in each group, and how many groups there are."""
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[", attributes)  # [groups,size]<=[…]
    if found:
        count, *size = (int(number) for number in found[1].split(","))
        return math.prod(size), count
    found = re.search(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", attributes)
    if found:
        groups = re.findall(r"\{([\d,]*)\}", found[1])
        return max(len(group.split(",")) for group in groups), len(groups)
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if found:
        return 2, max(len(re.findall(r"\{", found[1])), 1)
    return devices, 1
