"""The program cache of a function: its programs, by the signatures of its calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, final

import jax

from replicax import cluster
from replicax._hints import hint
from replicax.errors import ReplicaxError
from replicax.execution._cache_key import Signature
from replicax.execution._compiled_program import CompiledProgram
from replicax.execution._error_advice import add_recipe
from replicax.execution._iterator_elements import (
    AtItsEnd,
    NotOneProgram,
    ProgramsByElements,
    TakenElements,
    TakesElementsInLoop,
)
from replicax.execution._shard_map_operands import python_numbers

_MANY_TRACES = 10
_MOST_UNEVEN_PROGRAMS = 16  # Beyond this, eager calls are faster than more traces.


@final
class AsPython(enum.Enum):
    """The reasons why a function is not one program, and runs as Python."""

    UNEVEN = (
        "replicas whose shapes differ do not all do the same, or an argument is no array of numbers"
    )
    AT_END = "an iterator is at its end"
    LOOP = "it has a loop over a dataset, or of steps, and only what is inside of it is compiled"


_ByElements = ProgramsByElements[CompiledProgram | AsPython]


def _may_be_this_workers_own(error: Exception) -> bool:
    """Tell whether the other workers may have traced the same function without an error.

    Code that JAX or replicax cannot trace fails on every worker. Any other error may be this
    worker's alone, and the others would be in a program while this one continued.
    """
    for_all = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, ReplicaxError)
    return cluster.session() is not None and not isinstance(error, for_all)


@final
class ProgramCache:
    """The programs of one function, each compiled when a call first needs it.

    Args:
      name: The name of the function.
      python_function: The function.
    """

    def __init__(self, name: str, python_function: Callable[..., object]) -> None:
        self._name, self._python_function = name, python_function
        self._entries: dict[Signature, CompiledProgram | _ByElements | AsPython] = {}
        self._last_signature: Signature | None = None
        self._uneven_traces = 0
        self._warned = False

    @property
    def tracing_count(self) -> int:
        """The number of signatures it has been traced for."""
        entries = self._entries.values()
        ways = [
            way for entry in entries if isinstance(entry, ProgramsByElements) for way in entry.ways
        ]
        return sum(not isinstance(entry, ProgramsByElements) for entry in entries) + sum(
            isinstance(way, CompiledProgram) for way in ways
        )

    def program(
        self, signature: Signature | None, arrays: list[Any], *, take: bool = True
    ) -> tuple[CompiledProgram | AsPython, list[Any]]:
        """Return the program for a call, and its arrays: those of the arguments and of elements.

        By default, the elements are taken from their iterators.
        """
        if signature is None:
            return AsPython.UNEVEN, arrays
        leaves = signature.leaves
        entry = self._entries.get(signature)
        if entry is None:
            entry = self._trace(signature, arrays)
        if not isinstance(entry, ProgramsByElements):
            return entry, arrays
        found = entry.way(leaves)
        if found is None:
            entry = self._trace(signature, arrays, entry)
            found = entry.way(leaves) if isinstance(entry, ProgramsByElements) else None
        if found is None:
            return entry if isinstance(entry, AsPython) else AsPython.UNEVEN, arrays
        program, iterators, elements = found
        if isinstance(program, AsPython):
            return program, arrays
        if take:
            for iterator in iterators:
                next(iterator)
        return program, [*arrays, *(array for e in elements for array in e.arrays or ())]

    def _trace(
        self, signature: Signature, arrays: list[Any], by_elements: _ByElements | None = None
    ) -> CompiledProgram | _ByElements | AsPython:
        """Return what to do with calls of this signature; note it unless an iterator is at its end.

        `by_elements` has the ways for the other kinds of elements seen so far.
        """
        takes_uneven = self._uneven_traces < _MOST_UNEVEN_PROGRAMS
        taken = TakenElements(takes_uneven=takes_uneven)
        leaves = signature.leaves

        def uneven() -> bool:
            return signature.uneven or any(element.uneven for element in taken.elements)

        try:
            if signature.uneven and not takes_uneven:
                raise NotOneProgram
            way = self._compiled(signature, arrays, taken)
        except AtItsEnd:
            return AsPython.AT_END
        except TakesElementsInLoop:
            way = AsPython.LOOP
        except NotOneProgram:
            way = AsPython.UNEVEN
        except Exception as error:
            if not uneven() or _may_be_this_workers_own(error):
                add_recipe(error)
                raise
            # The error may come from a replica's own shapes. The eager run raises it too, and says
            # in which replica; code that merely cannot be traced works there.
            way = AsPython.UNEVEN
        self._uneven_traces += uneven()
        entry: CompiledProgram | _ByElements | AsPython = way
        # A loop runs as Python whatever the elements are, so calls do not look at them first.
        if way is not AsPython.LOOP and (taken.iterators or by_elements is not None):
            entry = by_elements or ProgramsByElements()
            entry.add(taken, self._python_function, leaves, way)
        reason = "the elements of an iterator changed their shapes"
        if by_elements is None:
            signature.forget_values()
            last, self._last_signature = self._last_signature, signature
            reason = "" if last is None else last.difference(signature)
        self._entries[signature] = entry
        if isinstance(way, CompiledProgram):
            self._warn_of_retracing(reason)
        return entry

    def _compiled(
        self, signature: Signature, arrays: list[Any], taken: TakenElements
    ) -> CompiledProgram:
        bound = signature.bind(self._python_function)
        plain = signature.plain_arrays()
        given = python_numbers(signature.leaves)
        return CompiledProgram(bound, signature.frame, arrays, plain, taken, given, self._name)

    def _warn_of_retracing(self, reason: str) -> None:
        if self._warned or self.tracing_count <= _MANY_TRACES:
            return
        self._warned = True
        hint(
            f"`{self._name}` has been traced {self.tracing_count} times, which is slow. The "
            f"last time because {reason}. Pass numbers that change as arrays (`jnp.asarray(x)`), "
            "and batches of one size."
        )
