"""The rule of variables whose copies are always equal: combine first, then write everywhere."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context
from replicax._context import Frame
from replicax._enums import VariableAggregation
from replicax.errors import AggregationRequired
from replicax.values import PerReplica
from replicax.variables._variable import WRITES, Combine, Variable, _replace

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


class SyncOnWriteVariable(Variable):
    """Replicas agree on the value before it is written; other contexts write it as it is."""

    @abstractmethod
    def _write_agreed(self, frame: Frame, combine: Combine, value: Any) -> None:
        """Writes in cross-replica or update context."""

    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        if not self._in_replica(frame):
            self._write_agreed(frame, combine, value)
            return
        self._require_aggregation(frame)

        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            combined = strategy.collectives.aggregate(self.aggregation, values)
            self._write_agreed(_context.current(), combine, combined)

        assert frame.replica is not None
        label = f"{WRITES[combine]} of variable {self.name!r}"
        frame.replica.merge(label, merged, (value,), subjects=(self, combine))

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        if not self._in_replica(frame):
            self._write_agreed(frame, _replace, value)
            return

        # All replicas come by with the same value; one that does not come is found out.
        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            agreed = strategy.collectives.broadcast(values)
            self._write_agreed(_context.current(), _replace, agreed)

        assert frame.replica is not None
        label = f"writing what variable {self.name!r} was assigned while differentiating"
        frame.replica.merge(label, merged, (value,), subjects=(self,))

    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        if not self._in_replica(frame):
            return value
        self._require_aggregation(frame)
        assert frame.replica is not None
        return frame.replica.aggregate(self, value)

    def _require_aggregation(self, frame: Frame) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise AggregationRequired(
                f"Variable {self.name!r} was assigned to by a replica, but has no `aggregation` to "
                f"combine the replicas' values. Current context: {frame}. Create it with "
                "`aggregation=rx.VariableAggregation.MEAN` (or SUM, ONLY_FIRST_REPLICA), or assign "
                "from `merge_call` or outside `run`."
            )
