"""replicax: several training steps per call, which is one program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from _problem import STEPS_A_CALL, Cell
from _protocol import serve
from _replicax import TRAINING_VERSIONS, distributed_arrays, mirrored_strategy, training_of

import replicax as rx


def build(cell: Cell) -> Callable[[], float]:
    # tf.distribute calls it deprecated, and so does replicax.
    warnings.filterwarnings("ignore", ".*experimental_run_steps_on_iterator", DeprecationWarning)
    strategy = mirrored_strategy(cell.replicas)
    train = training_of(cell, strategy)
    iterator = iter(distributed_arrays(cell, strategy))

    @rx.function
    def step(context: Any, batch: tuple[Any, Any]) -> None:
        context.set_last_step_output("loss", train(*batch))

    def steps() -> float:
        context = strategy.extended.experimental_run_steps_on_iterator(step, iterator, STEPS_A_CALL)
        return float(context.last_step_outputs["loss"])

    return steps


if __name__ == "__main__":
    serve(build, TRAINING_VERSIONS)
