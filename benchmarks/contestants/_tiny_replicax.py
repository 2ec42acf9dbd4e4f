"""The smallest possible step in replicax."""

from __future__ import annotations

from typing import Any

from _tiny_jax import Step, sum_through_layers
from _tiny_program import CONSTANT, Program

import replicax as rx


class Replicax:
    """The program in replicax, with its variables."""

    def __init__(self, program: Program, strategy: rx.Strategy) -> None:
        self._program = program
        self._strategy = strategy
        with strategy.scope():
            self._variables = [rx.Variable(zeros) for zeros in program.zeros]
        self._rows = strategy.experimental_distribute_values_from_function(lambda _: program.batch)

    def build(self, *, collective: bool) -> Step:
        strategy = self._strategy

        @rx.function
        def step(rows: Any) -> Any:
            for variable in self._variables:
                variable.assign_add(CONSTANT)
            sums = strategy.run(sum_through_layers, args=(rows, self._program.layers))
            return strategy.reduce(rx.ReduceOp.SUM, sums, axis=None) if collective else sums

        if collective or strategy.num_replicas_in_sync == 1:
            return lambda: step(self._rows)
        return lambda: step(self._rows).array(strategy.topology)

    def value(self) -> float:
        return float(self._variables[-1].numpy()[0])
