"""The TensorFlow twin of input.py: records what the port is compared with.

    cd examples/ports
    python -m reference.input recorded/input.json

In an environment of its own: pip install tensorflow-cpu==2.21 scikit-learn
"""

# TensorFlow's types ask for tensors where arrays will do.
# pyright: reportArgumentType=false

from __future__ import annotations

import sys

import keras
import tensorflow as tf
from starting_point import digits, initial_weights, record

GLOBAL_BATCH = 64


def main(path: str) -> None:
    """Train on two logical CPU devices, and write down the losses."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    learn, test = ((images.reshape(-1, 64), labels) for images, labels in digits())

    with strategy.scope():
        kernel, bias = (
            tf.Variable(value, name=name)
            for name, value in initial_weights({"output": (64, 10)}).items()
        )
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([kernel, bias])

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, images @ kernel + bias)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, [kernel, bias])
        optimizer.apply_gradients(zip(gradients, [kernel, bias], strict=True))
        return loss

    def step(batch: tuple) -> tf.Tensor:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    batches = tf.data.Dataset.from_tensor_slices(learn).batch(GLOBAL_BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = strategy.experimental_distribute_dataset(batches.with_options(options))

    with_signature = tf.function(step, input_signature=[dataset.element_spec])
    losses = [float(with_signature(batch)) for batch in dataset]

    @tf.function
    def step_from(iterator: tf.distribute.DistributedIterator) -> tf.Tensor:
        return step(next(iterator))

    iterator = iter(dataset)
    while True:
        try:
            losses.append(float(step_from(iterator)))
        except tf.errors.OutOfRangeError:
            break

    compiled, iterator = tf.function(step), iter(dataset)
    while (optional := iterator.get_next_as_optional()).has_value():
        losses.append(float(compiled(optional.get_value())))

    def rows_of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = tf.data.Dataset.from_tensor_slices(learn).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return mine.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))

    of_workers = strategy.distribute_datasets_from_function(rows_of_worker)
    losses += [float(compiled(batch)) for batch in of_workers]

    @tf.function
    def epoch(dataset: tf.distribute.DistributedDataset) -> tf.Tensor | float:
        total, steps = 0.0, 0.0
        for batch in dataset:
            total += step(batch)
            steps += 1.0
        return total / steps

    mean = float(epoch(dataset))
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(
            tf.constant(array[context.replica_id_in_sync_group :: context.num_replicas_in_sync])
            for array in test
        )
    )

    def hits_of(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.argmax(images @ kernel + bias, -1, tf.int32) == labels, tf.float32)

    hits = strategy.run(hits_of, args=shares)
    accuracy = float(strategy.reduce(tf.distribute.ReduceOp.MEAN, hits, axis=0))
    curves = {"loss": losses, "mean_loss_of_last_epoch": [mean], "test_accuracy": [accuracy]}
    print({name: (len(curve), curve[0], curve[-1]) for name, curve in curves.items()})
    record(path, f"TensorFlow {tf.__version__}, Keras {keras.__version__}", curves)


if __name__ == "__main__":
    main(sys.argv[1])
