"""TensorFlow: several training steps per call, a loop inside the `tf.function`."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from _problem import STEPS_A_CALL, Cell
from _protocol import serve
from _tensorflow import VERSIONS, distributed_arrays, split_cpu, training_of


def build(cell: Cell) -> Callable[[], float]:
    strategy = tf.distribute.MirroredStrategy(split_cpu(cell.replicas))
    train = training_of(cell, strategy)

    @tf.function
    def steps(iterator: tf.distribute.DistributedIterator) -> tf.Tensor:
        loss = tf.constant(0.0)
        for _ in tf.range(STEPS_A_CALL):
            loss = train(*next(iterator))
        return loss

    iterator = iter(distributed_arrays(cell, strategy))
    return lambda: float(steps(iterator))


if __name__ == "__main__":
    serve(build, VERSIONS)
