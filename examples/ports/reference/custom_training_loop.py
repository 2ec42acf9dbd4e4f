"""The TensorFlow twin of custom_training_loop.py: records what the port is compared with.

    cd examples/ports
    python -m reference.custom_training_loop recorded/custom_training_loop.json

In an environment of its own: pip install tensorflow-cpu==2.21 scikit-learn
"""

# Keras has no types, and type checkers guess wrong ones, such as None for losses.
# pyright: reportArgumentType=false

from __future__ import annotations

import sys
import tempfile

import keras
import tensorflow as tf
from starting_point import digits, initial_weights, record

GLOBAL_BATCH = 64
EPOCHS = 10
LAYERS = {
    "first": (3, 3, 1, 16),
    "second": (3, 3, 16, 32),
    "hidden": (128, 64),
    "output": (64, 10),
}


def network() -> keras.Model:
    """Return the same network, with the same weights."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.set_weights(list(initial_weights(LAYERS).values()))
    return model


def main(path: str) -> None:
    """Train on two logical CPU devices, and write down the losses."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    learn, test = digits()
    training = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(learn).batch(GLOBAL_BATCH)
    )
    testing = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(test).batch(GLOBAL_BATCH)
    )

    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(1e-3)
        # Otherwise its variables would be made in the first step, where TensorFlow 2.21 with Keras
        # 3.15 fails: "You must feed a value for placeholder tensor".
        optimizer.build(model.trainable_variables)
        losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_loss = keras.metrics.Mean()
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = losses_of(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def test_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        logits = model(images, training=False)
        test_loss.update_state(losses_of(labels, logits))
        test_accuracy.update_state(labels, logits)

    @tf.function
    def distributed_train_step(batch: tuple) -> tf.Tensor:
        losses = strategy.run(train_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def distributed_test_step(batch: tuple) -> None:
        strategy.run(test_step, args=batch)

    curves: dict[str, list[float]] = {"loss": [], "test_loss": [], "test_accuracy": []}
    with tempfile.TemporaryDirectory() as directory:
        for epoch in range(EPOCHS):
            for batch in training:
                curves["loss"].append(float(distributed_train_step(batch)))
            for batch in testing:
                distributed_test_step(batch)
            checkpoint.save(f"{directory}/ckpt")
            curves["test_loss"].append(float(test_loss.result()))
            curves["test_accuracy"].append(float(test_accuracy.result()))
            print(epoch + 1, {name: curve[-1] for name, curve in curves.items()})
            test_loss.reset_state()
            test_accuracy.reset_state()
        plain = network()
        latest = tf.train.latest_checkpoint(directory)
        tf.train.Checkpoint(model=plain).restore(latest).expect_partial()
        print("without a strategy:", (plain(test[0]).numpy().argmax(-1) == test[1]).mean())
    record(path, f"TensorFlow {tf.__version__}, Keras {keras.__version__}", curves)


if __name__ == "__main__":
    main(sys.argv[1])
