"""Updates of variables that their servers compute, such as those of an optimizer.

An update is one function of many variables. Each server computes what belongs to its own arrays, so
the function is taken apart: a server gets the part of its program that gives its results, which
must not need values that are on another server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from replicax._jax_compat import constants_in, needed_inputs
from replicax.errors import InvalidArgument
from replicax.variables._server_storage import OnServers, Piece
from replicax.variables._variable import Variable, storage_of

# From the values of variables and operands to new values of the variables.
UpdateFunction = Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]


@final
@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """The part of an update that one server computes.

    Args:
      server: The index of the server.
      program: From the values of `arrays` and `operands` to those of `changed`.
      arrays: The numbers of the arrays that it needs.
      operands: The operands.
      changed: The numbers of the arrays that get the results.
    """

    server: int
    program: ClosedJaxpr
    arrays: list[int]
    operands: list[jax.Array]
    changed: list[int]


def updates_by_server(
    variables: Sequence[Variable],
    function: UpdateFunction,
    operands: Sequence[jax.Array],
    owners: Sequence[Variable | None],
) -> list[ServerUpdate]:
    """Return what each server computes of an update.

    Args:
      variables: The variables that it changes.
      function: The update.
      operands: Its operands.
      owners: For each, the variable whose shape it has, as a gradient does; or None. Of a variable
        in parts, each part is updated with the part of the operand.
    """
    storages = [_on_servers(variable) for variable in variables]
    shaped_like = [None if owner is None else _on_servers(owner) for owner in owners]
    rounds = [
        _Round.of(number, storages, function, operands, shaped_like)
        for number in range(max(len(storage.parts) for storage in storages))
    ]
    servers = sorted({piece.server for storage in storages for piece in storage.pieces})
    return [_of_server(server, storages, rounds) for server in servers]


def _on_servers(variable: Variable) -> OnServers:
    storage = storage_of(variable)
    if not isinstance(storage, OnServers):
        raise InvalidArgument(
            f"Variable {variable.name!r} is not on a parameter server, and was to be updated with "
            "others that are. Create it in the scope of the strategy."
        )
    return storage


@final
@dataclass(frozen=True, slots=True)
class _Round:
    """The update of one part of every variable: the first of each, then the second, and so on.

    Variables that are not in parts are updated in the first round.
    """

    number: int
    program: ClosedJaxpr
    shapes: list[jax.ShapeDtypeStruct]
    operands: list[jax.Array]
    like_rows: list[list[slice] | None]  # of the owner of each operand that is in parts

    @classmethod
    def of(
        cls,
        number: int,
        storages: Sequence[OnServers],
        function: UpdateFunction,
        operands: Sequence[jax.Array],
        owners: Sequence[OnServers | None],
    ) -> _Round:
        shapes = []
        for storage in storages:
            rows = _rows_in(storage, number)
            shape = storage.shape if rows is None else (rows.stop - rows.start, *storage.shape[1:])
            shapes.append(jax.ShapeDtypeStruct(shape, storage.dtype))
        given, like_rows = [], []
        for operand, owner in zip(operands, owners, strict=True):
            rows = None if owner is None else _rows_in(owner, number)
            given.append(operand if rows is None else operand[rows])
            like_rows.append(None if owner is None or rows is None else _all_rows(owner))
        examples = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given]
        program = jax.make_jaxpr(function)(shapes, examples)
        if any(isinstance(constant, Tracer) for constant in constants_in(program)):
            raise InvalidArgument(
                "The function given to `update` uses a value that is computed outside of it and is "
                "no argument of it, so it cannot be sent to a parameter server. Pass it in `args`."
            )
        return cls(number, program, shapes, given, like_rows)

    def piece(self, storage: OnServers, server: int) -> Piece | None:
        """Return the piece of a variable that this round can use on a server."""
        if storage.is_copied:
            return next(piece for piece in storage.pieces if piece.server == server)
        number = self.number if len(storage.pieces) > 1 else 0
        piece = storage.pieces[number] if number < len(storage.pieces) else None
        return piece if piece is not None and piece.server == server else None

    def wanted(self, storages: Sequence[OnServers], server: int) -> list[int]:
        """Return the variables of which a server updates a piece in this round."""
        return [
            index
            for index, storage in enumerate(storages)
            if (self.number == 0 or len(storage.parts) > 1) and self.piece(storage, server)
        ]

    def needs(self, storages: Sequence[OnServers], server: int) -> tuple[list[int], list[int]]:
        """Return the variables and operands that a server needs; refuse what it cannot have."""
        count = len(storages)
        values: set[int] = set()
        operands: set[int] = set()
        for index in self.wanted(storages, server):
            needed = needed_inputs(self.program, [index])
            for other in (other for other in range(count) if needed[other]):
                if self.piece(storages[other], server) is None:
                    raise _coupled(storages[index].name, storages[other].name)
                values.add(other)
            for number in (n for n in range(len(self.operands)) if needed[count + n]):
                like = self.like_rows[number]
                if like is not None and like != _all_rows(storages[index]):
                    raise _coupled(storages[index].name, "another one, which is in parts")
                operands.add(number)
        return sorted(values), sorted(operands)


def _of_server(
    server: int, storages: Sequence[OnServers], rounds: Sequence[_Round]
) -> ServerUpdate:
    arrays: dict[int, jax.ShapeDtypeStruct] = {}
    operands: list[jax.Array] = []
    steps = []
    changed: list[int] = []
    for each in rounds:
        wanted = each.wanted(storages, server)
        if not wanted:
            continue
        values, needed = each.needs(storages, server)
        numbers = {index: _number(each.piece(storages[index], server)) for index in values}
        arrays.update({numbers[index]: each.shapes[index] for index in values})
        places = {index: len(operands) + place for place, index in enumerate(needed)}
        operands += [each.operands[index] for index in needed]
        changed += [_number(each.piece(storages[index], server)) for index in wanted]
        steps.append((each, wanted, numbers, places))
    order = list(arrays)

    def program(*given: jax.Array) -> list[jax.Array]:
        value_of = dict(zip(order, given, strict=False))
        operand_of = given[len(order) :]
        results = []
        for each, wanted, numbers, places in steps:
            inputs = [
                value_of[numbers[index]] if index in numbers else jnp.zeros(like.shape, like.dtype)
                for index, like in enumerate(each.shapes)
            ]
            inputs += [
                operand_of[places[index]]
                if index in places
                else jnp.zeros(operand.shape, operand.dtype)
                for index, operand in enumerate(each.operands)
            ]
            new = jaxpr_as_fun(each.program)(*inputs)
            results += [new[index] for index in wanted]
        return results

    examples = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    traced = jax.make_jaxpr(program)(*arrays.values(), *examples)
    return ServerUpdate(server, traced, order, operands, changed)


def _number(piece: Piece | None) -> int:
    assert piece is not None
    return piece.number


def _rows_in(storage: OnServers, number: int) -> slice | None:
    """Return the rows of the part of a round; None if the variable is not in parts."""
    if len(storage.parts) == 1:
        return None
    return storage.parts[min(number, len(storage.parts) - 1)].rows


def _all_rows(storage: OnServers) -> list[slice]:
    return [part.rows for part in storage.parts if part.rows is not None]


def _coupled(name: str, other: str) -> InvalidArgument:
    return InvalidArgument(
        f"The update of variable {name!r} needs {other!r}, which is on another parameter server. "
        "Each server updates its own variables, without waiting for others. Compute what couples "
        "them, such as a norm of all gradients, in the function that is scheduled, before the "
        "update; or create both with `strategy.extended.colocate_vars_with`."
    )
