"""The training step in TensorFlow: the same program, and the same distributed dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from _batches import arrays_of
from _problem import Batch, Cell, problem_of
from _protocol import serve

VERSIONS = {"tensorflow": tf.__version__, "keras": tf.keras.__version__}


def serve_tensorflow(compiled: bool) -> None:
    serve(lambda cell: build(cell, compiled), VERSIONS)


def build(cell: Cell, compiled: bool) -> Callable[[], float]:
    names = split_cpu(cell.replicas)
    strategy = tf.distribute.MirroredStrategy(names)
    train = training_of(cell, strategy)
    batch = constant_batch(problem_of(cell), strategy, names)
    step_of_all = tf.function(train) if compiled else train
    return lambda: float(step_of_all(*batch))


def training_of(
    cell: Cell, strategy: tf.distribute.Strategy
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return a training step of all replicas, from their rows and labels to the loss."""
    problem = problem_of(cell)
    with strategy.scope():
        weights = [tf.Variable(weight) for weight in problem.weights]
        biases = [tf.Variable(bias) for bias in problem.biases]
        optimizer = tf.keras.optimizers.SGD(cell.learning_rate)
    variables = [*weights, *biases]

    def loss_of(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        hidden = rows
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            hidden = tf.nn.relu(hidden @ weight + bias)
        logits = hidden @ weights[-1] + biases[-1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_sum(losses) / cell.global_batch

    def step(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(rows, labels)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def train(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(step, args=(rows, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return train


def constant_batch(
    batch: Batch, strategy: tf.distribute.Strategy, devices: Sequence[str]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rows and labels, on the replicas' devices, which are given by their names."""

    def share(context: tf.distribute.experimental.ValueContext) -> tuple[tf.Tensor, tf.Tensor]:
        replica = context.replica_id_in_sync_group
        # By default TensorFlow puts all shares on the first device, and copies them in each step.
        with tf.device(devices[replica]):
            return tf.constant(batch.rows[replica]), tf.constant(batch.labels[replica])

    return strategy.experimental_distribute_values_from_function(share)


def distributed_arrays(
    cell: Cell, strategy: tf.distribute.Strategy
) -> tf.distribute.DistributedDataset:
    """Return batches of arrays in memory, repeated endlessly."""
    batches = tf.data.Dataset.from_tensor_slices(arrays_of(cell)).batch(cell.global_batch)
    return strategy.experimental_distribute_dataset(batches.repeat())


def split_cpu(count: int) -> list[str]:
    """Split the host CPU into so many devices, and return their names."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    return [f"CPU:{index}" for index in range(count)]
