"""The tutorial "Custom training with tf.distribute.Strategy" as a replicax program.

    python examples/ports/custom_training_loop.py --replicas 2
    python examples/ports/custom_training_loop.py --replicas 1    # the same losses

In an environment with replicax[demo]. A convolutional network learns scanned digits in a loop of
its own, is saved after every epoch, and is in the end restored and tested without a strategy.
docs/ports/custom_training_loop.md has it beside the TensorFlow program.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from starting_point import digits, initial_weights, record

import replicax as rx

GLOBAL_BATCH = 64
LAYERS = {
    "first": (3, 3, 1, 16),
    "second": (3, 3, 16, 32),
    "hidden": (128, 64),
    "output": (64, 10),
}


class Network:
    """Two convolutions and two dense layers, with variables that the current strategy places."""

    def __init__(self) -> None:
        self.weights = {
            name: rx.Variable(value, name=name) for name, value in initial_weights(LAYERS).items()
        }

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for layer in ("first", "second"):
            x = jax.lax.conv_general_dilated(
                x,
                self.weights[f"{layer}_kernel"].value,
                window_strides=(1, 1),
                padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + self.weights[f"{layer}_bias"])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(len(x), 128)
        x = jax.nn.relu(x @ self.weights["hidden_kernel"] + self.weights["hidden_bias"])
        return x @ self.weights["output_kernel"] + self.weights["output_bias"]


def keras_adam(learning_rate: float) -> optax.GradientTransformation:
    """Return Adam as Keras has it.

    Keras adds its epsilon before the second moment is corrected for its beginning at zero, Optax
    after. That is an epsilon that shrinks from step to step; with a constant one, the losses are
    those of Keras up to 3 %. The decay rates are not to be arrays, as 1 - float32(0.999) is not
    float32(0.001).
    """
    return optax.inject_hyperparams(optax.adam, static_args=("b1", "b2", "eps_root"))(
        learning_rate, eps=lambda step: 1e-7 / jnp.sqrt(1 - 0.999 ** (step + 1))
    )


@click.command()
@click.option("--replicas", default=2, show_default=True, help="So many virtual devices.")
@click.option("--epochs", default=10, show_default=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir()) / "replicax_custom_training_loop",
    show_default=True,
    help="Where to save.",
)
@click.option("--losses", "path", help="A file to write the losses of all steps to, as JSON.")
def main(replicas: int, epochs: int, directory: Path, path: str | None) -> None:
    """Train, test and save in every epoch; then restore, and test without a strategy."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    learn, test = digits()
    training = strategy.experimental_distribute_dataset(
        rx.from_tensor_slices(learn).batch(GLOBAL_BATCH)
    )
    testing = strategy.experimental_distribute_dataset(
        rx.from_tensor_slices(test).batch(GLOBAL_BATCH)
    )

    with strategy.scope():
        model = Network()
        optimizer = rx.Optimizer(keras_adam(1e-3))
        train_accuracy = rx.metrics.Accuracy(name="train_accuracy")
        test_accuracy = rx.metrics.Accuracy(name="test_accuracy")
        test_loss = rx.metrics.Mean(name="test_loss")
    variables = list(model.weights.values())

    def train_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        """One replica's part; what it returns is its part of the loss of the global batch."""

        def loss_fn() -> tuple[jax.Array, jax.Array]:
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return rx.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH), logits

        (loss, logits), gradients = rx.value_and_grad(loss_fn, variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        train_accuracy.update_state(labels, logits.argmax(axis=-1))
        return loss

    def test_step(images: jax.Array, labels: jax.Array) -> None:
        logits = model(images)
        test_loss.update_state(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        test_accuracy.update_state(labels, logits.argmax(axis=-1))

    @rx.function
    def distributed_train_step(batch: tuple[rx.PerReplica, rx.PerReplica]) -> jax.Array:
        losses = strategy.run(train_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    @rx.function
    def distributed_test_step(batch: tuple[rx.PerReplica, rx.PerReplica]) -> None:
        strategy.run(test_step, args=batch)

    checkpoint = rx.Checkpoint(optimizer=optimizer, model=model.weights)
    curves: dict[str, list[float]] = {"loss": [], "test_loss": [], "test_accuracy": []}
    for epoch in range(epochs):
        losses = [float(distributed_train_step(batch)) for batch in training]
        for batch in testing:
            distributed_test_step(batch)
        checkpoint.save(directory / "ckpt")
        curves["loss"] += losses
        curves["test_loss"].append(float(test_loss.result()))
        curves["test_accuracy"].append(float(test_accuracy.result()))
        print(
            f"Epoch {epoch + 1}: loss {np.mean(losses):.4f}, "
            f"accuracy {train_accuracy.result():.4f}, test loss {test_loss.result():.4f}, "
            f"test accuracy {test_accuracy.result():.4f}"
        )
        for metric in (train_accuracy, test_loss, test_accuracy):
            metric.reset_state()

    # Elsewhere: no strategy, one device, the weights of the latest checkpoint.
    plain, accuracy = Network(), rx.metrics.Accuracy()
    latest = rx.latest_checkpoint(directory)
    rx.Checkpoint(model=plain.weights).restore(latest).assert_existing_objects_matched()
    predict = rx.function(plain)
    for images, labels in rx.from_tensor_slices(test).batch(GLOBAL_BATCH):
        accuracy.update_state(labels, predict(images).argmax(axis=-1))
    print(f"Restored {latest}; accuracy without a strategy: {accuracy.result():.4f}")
    if path is not None:
        record(path, f"replicax {rx.__version__}, JAX {jax.__version__}", curves)


if __name__ == "__main__":
    main()
