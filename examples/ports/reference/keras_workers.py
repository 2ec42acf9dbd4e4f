"""The TensorFlow twin of keras_workers.py: records what the port is compared with.

    cd examples/ports
    python -m reference.keras_workers recorded/keras_workers.json

In an environment of its own: pip install tensorflow-cpu==2.21 tf_keras==2.21 scikit-learn

It starts its two workers itself. Its Keras is the older one, `tf_keras`: `fit` of Keras 3.15 fails
with this strategy ("Attempt to convert a value (PerReplica...) ... to a Tensor").
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile

import tensorflow as tf
import tf_keras as keras
from starting_point import digits, initial_weights, record

GLOBAL_BATCH = 64
STEPS_PER_EPOCH = 22
EPOCHS = 10
LAYERS = {"convolution": (3, 3, 1, 16), "hidden": (256, 64), "output": (64, 10)}


def network() -> keras.Model:
    """Return the same model, with the same weights."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.InputLayer((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.set_weights(list(initial_weights(LAYERS).values()))
    return model


def work(path: str) -> None:
    """Train as one of the workers that TF_CONFIG lists; the chief writes down the losses."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    chief = strategy.cluster_resolver.task_id == 0
    learn, test = digits()
    dataset = tf.data.Dataset.from_tensor_slices(learn).repeat().batch(GLOBAL_BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        model = network()
    directory = tempfile.mkdtemp()
    history = model.fit(
        dataset.with_options(options),
        epochs=EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        callbacks=[keras.callbacks.BackupAndRestore(f"{directory}/backup")],
        verbose=2 if chief else 0,
    ).history
    model.save(f"{directory}/digits.keras")
    if chief:
        loaded = keras.models.load_model(f"{directory}/digits.keras")
        _, accuracy = loaded.evaluate(*test, batch_size=GLOBAL_BATCH, verbose=0)
        curves = {"loss": history["loss"], "test_accuracy": [accuracy]}
        made_by = f"TensorFlow {tf.__version__}, tf_keras {keras.__version__}"
        record(path, made_by, curves)
    shutil.rmtree(directory)


def main(path: str) -> None:
    """Start two workers on this machine, and wait for them."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
    command = [sys.executable, "-m", "reference.keras_workers", path]
    workers = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
        workers.append(subprocess.Popen(command, env=environment))
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    (work if "TF_CONFIG" in os.environ else main)(sys.argv[1])
