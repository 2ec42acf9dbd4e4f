"""The exchange of NNX objects' contents while a function runs: each replica has its own values.

Replicas share one set of objects, so their contents are exchanged: before a function runs, for
those that it should see; afterwards, for the original ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from replicax.errors import ContextError
from replicax.integrations.flax._private import (
    State,
    current_trace,
    node_state,
    raw_value,
    set_node_state,
    variable_state,
)
from replicax.integrations.flax._rules import Rule, Rules, as_read
from replicax.integrations.flax._variables import Adopted, adopted
from replicax.integrations.flax._writing_back import Change, combine_and_store, store
from replicax.variables import state_of

if TYPE_CHECKING:
    from replicax._context import Frame
    from replicax.integrations.flax._discovery import Reached

# The current exchange in this thread.
active: ContextVar[InReplica | AcrossReplicas | None] = ContextVar("nnx_objects", default=None)


@final
class Contents:
    """A snapshot of the contents of some objects."""

    def __init__(self, variables: Sequence[nnx.Variable], nodes: Sequence[nnx.Pytree]) -> None:
        self._variables, self._nodes = variables, nodes
        self.states: list[State] = [variable.__getstate__() for variable in variables]
        self.node_states: list[State] = [node.__getstate__() for node in nodes]

    def put(self) -> None:
        """Restore everything, and remove what was added."""
        for variable, state in zip(self._variables, self.states, strict=True):
            variable.__setstate__(state)
        self.put_attributes()

    def put_attributes(self) -> None:
        """Restore everything except the values of variables."""
        for node, state in zip(self._nodes, self.node_states, strict=True):
            set_node_state(node, state)

    def values(self) -> list[Any]:
        return [raw_value(state) for state in self.states]


class _Exchange:
    """The objects that a function uses, with its own values in them."""

    def __init__(
        self,
        reached: Sequence[Reached],
        nodes: Sequence[nnx.Pytree],
        outer: InReplica | AcrossReplicas | None,
    ) -> None:
        self.nodes = nodes
        self.adopted: list[Adopted] = [adopted(each) for each in reached]
        self._variables = [each.variable for each in reached]
        self.outer = outer
        self._rules = Rules(nodes)
        self._each_rule = [self._rules.of(variable) for variable in self._variables]
        self._given: list[list[Any]] = []
        self._ids = {id(thing) for thing in (*self._variables, *nodes)}

    def covers(self, thing: nnx.Variable | nnx.Pytree) -> bool:
        """Tell whether an object has been exchanged, here or in an outer exchange."""
        around = self.outer is not None and self.outer.covers(thing)
        return around or id(thing) in self._ids

    def undo(self) -> None:
        """Restore everything after a failure."""
        self._before.put()
        self._first.put_attributes()  # values that others wrote are restored with our variables

    def _begin(self) -> None:
        self._first = self._before = self._take()

    def _take(self) -> Contents:
        return Contents(self._variables, self.nodes)

    def _put(self, values: Sequence[object]) -> None:
        """Give the variables these values, and assign all objects to the current trace."""
        trace = current_trace()
        self._given = [jax.tree.leaves(value) for value in values]
        for variable, state, value in zip(
            self._variables, self._before.states, values, strict=True
        ):
            variable.__setstate__(variable_state(state, value, trace))
        for node, state in zip(self.nodes, self._before.node_states, strict=True):
            set_node_state(node, node_state(state))

    def _changes(self) -> list[Change]:
        return [self._change(index) for index in self._changed()]

    def _change(self, index: int) -> Change:
        each = self.adopted[index]
        before = each.arrays_among(self._given[index])
        after = each.arrays_of(self._variables[index].get_raw_value())
        return Change(each, self._each_rule[index], before, after)

    def _changed(self) -> list[int]:
        """Return the indices of the variables whose values the function has replaced."""
        return [
            index
            for index, (variable, rule, given) in enumerate(
                zip(self._variables, self._each_rule, self._given, strict=True)
            )
            if rule not in (Rule.KEY, Rule.ASIDE) and not _same(variable.get_raw_value(), given)
        ]


@final
class InReplica(_Exchange):
    """The exchange for the code of one replica of a strategy."""

    def __init__(
        self,
        reached: Sequence[Reached],
        nodes: Sequence[nnx.Pytree],
        outer: InReplica | AcrossReplicas | None,
        frame: Frame,
    ) -> None:
        super().__init__(reached, nodes, outer)
        assert frame.strategy is not None
        assert frame.replica is not None
        self._strategy, self._replica = frame.strategy, frame.replica
        for each, rule in zip(self.adopted, self._each_rule, strict=True):
            each.strategy = self._strategy
            for variable in each.variables(self._strategy) if rule is not Rule.ASIDE else ():
                if frame.program is None and frame.transaction is not None:
                    # This also covers plain NNX writes by a function given to `merge_call`.
                    frame.transaction.remember(variable, state_of(variable))
        self._begin()
        self._put([self._read(i) for i in range(len(self.adopted))])

    def finish(self) -> None:
        """Store the replicas' changes once the function has returned."""
        try:
            changes = self._changes()
        finally:
            self._before.put()
        combine_and_store(self._strategy, self._replica, changes, self._rules.moments)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the original contents while other code uses the objects."""
        mine = self._take()
        self._before.put()
        try:
            yield
        finally:
            # A function given to `merge_call` may have changed variables for all replicas.
            new = {
                index: self._read(index)
                for index, value in enumerate(self._before.values())
                if self._variables[index].get_raw_value() is not value
            }
            self._before = self._take()
            mine.put()
            for index, value in new.items():
                self._given[index] = jax.tree.leaves(value)
                state = variable_state(self._before.states[index], value, current_trace())
                self._variables[index].__setstate__(state)

    def _read(self, index: int) -> object:
        rule = self._each_rule[index]
        if rule is Rule.ASIDE:
            return raw_value(self._before.states[index])
        value = self.adopted[index].read(self._strategy)
        number = self._replica.replica_id_in_sync_group
        return value if self._replica.num_replicas_in_sync == 1 else as_read(rule, value, number)


@final
class AcrossReplicas(_Exchange):
    """The exchange for a compiled function outside of `run`, or without a strategy."""

    def __init__(
        self,
        reached: Sequence[Reached],
        nodes: Sequence[nnx.Pytree],
        outer: InReplica | AcrossReplicas | None,
        frame: Frame,
    ) -> None:
        super().__init__(reached, nodes, outer)
        assert frame.program is not None
        self._first_pass = frame.program.is_first_pass
        self._trace_state = get_opaque_trace_state()
        self._to_be_stored: dict[int, None] = {}
        for each in self.adopted:
            each.strategy = each.strategy or frame.strategy
        self._begin()
        self._put(self._read())

    def finish(self) -> None:
        """Store the function's changes once it has returned."""
        try:
            changes = self._note_changes()
        finally:
            self._before.put()
        self._store(changes)
        if self._first_pass:
            # Only now is it known which strategy ran the steps and owns the variables.
            for each, rule in zip(self.adopted, self._each_rule, strict=True):
                if rule is not Rule.ASIDE:
                    each.read(each.strategy)
            for index in self._to_be_stored:
                each = self.adopted[index]
                store(each.variables(each.strategy), each.arrays_of(each.nothing()))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Make earlier changes visible to a `run`, and its changes visible afterwards."""
        here = get_opaque_trace_state() == self._trace_state
        changes = self._note_changes() if here else []
        if not here and (changed := self._changed()):
            self._refuse_loop([self.adopted[index].name for index in changed])
        mine = [node.__getstate__() for node in self.nodes]
        self._before.put()
        self._store(changes)
        try:
            yield
        finally:
            self._before = self._take()
            loop = _InALoop()
            self._put(self._read() if here else [loop] * len(self.adopted))
            for node, state in zip(self.nodes, mine, strict=True):
                set_node_state(node, state)

    def _read(self) -> list[object]:
        return [
            raw_value(state)
            if rule is Rule.ASIDE
            else each.nothing()
            if self._first_pass
            else each.read(each.strategy)
            for each, rule, state in zip(
                self.adopted, self._each_rule, self._before.states, strict=True
            )
        ]

    def _note_changes(self) -> list[Change]:
        """Return the changes to store now; in the first pass, they are stored at the end."""
        if not self._first_pass:
            return self._changes()
        self._to_be_stored.update(dict.fromkeys(self._changed()))
        return []

    def _store(self, changes: Sequence[Change]) -> None:
        for change in changes:
            each = change.adopted
            store(each.variables(each.strategy), change.after)

    def _refuse_loop(self, names: Sequence[str]) -> NoReturn:
        raise ContextError(
            "NNX variables were changed in a compiled function before a loop of JAX that runs "
            f"steps: {', '.join(names)}. Change them before the function is called, or in the "
            "steps."
        )


def _same(value: object, leaves: Sequence[object]) -> bool:
    now = jax.tree.leaves(value)
    return len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))


@final
class _InALoop:
    """A placeholder for a value that a JAX loop (`lax.scan`) changes and that is not known yet.

    Reading it raises an error.
    """

    _message = (
        "An NNX variable was read in a compiled function after a loop of JAX that has run steps "
        "on it. Read it when the function has returned."
    )

    def __getattr__(self, name: str) -> NoReturn:
        raise ContextError(self._message) if not name.startswith("__") else AttributeError(name)

    def __getitem__(self, key: object) -> NoReturn:
        raise ContextError(self._message)

    def __repr__(self) -> str:
        return f"<{self._message}>"
