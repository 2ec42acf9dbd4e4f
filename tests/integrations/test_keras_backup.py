"""A `fit` that was cut off goes on, and ends as if it had not been."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
from keras_models import LABELS, TABLE, keras, layers

import replicax as rx
from replicax.errors import InvalidArgument

# Keras 3.15 converts its variables in a way that NumPy 2 warns of, for callbacks that ask for them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]
ROWS, BATCH, EPOCHS = 20, 4, 3  # five steps an epoch


class Killed(BaseException):
    """The end of a process, as far as `fit` can tell."""


class Kill(keras.callbacks.Callback):
    """Ends a `fit` after so many steps; notes what became of the others."""

    def __init__(self, after):
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch, logs=None):
        if self._left == 0:
            raise Killed
        self._left -= 1


def build(strategy):
    keras.utils.set_random_seed(9)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(6, activation="relu"),
                layers.Dropout(0.5),
                layers.Dense(3, activation="softmax"),
            ]
        )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


X = np.concatenate([TABLE[:ROWS], np.arange(ROWS, dtype=np.float32)[:, None] / ROWS], axis=1)
Y = LABELS[:ROWS]


def arrays(strategy):
    return {"x": X, "y": Y, "batch_size": BATCH}


def dataset(strategy):
    rows = rx.from_tensor_slices((X, Y)).shuffle(seed=3).batch(BATCH)
    return {"x": strategy.experimental_distribute_dataset(rows)}


def endless(strategy):
    rows = rx.from_tensor_slices((X, Y)).shuffle(seed=3).repeat().batch(BATCH)
    return {"x": strategy.experimental_distribute_dataset(rows), "steps_per_epoch": 3}


def passes_of_their_own(strategy):
    """Keras keeps its place in them from epoch to epoch."""
    rows = rx.from_tensor_slices((X, Y)).shuffle(seed=3).repeat(4).batch(BATCH)
    return {"x": rows, "steps_per_epoch": 3, "shuffle": False}


def killed(model, data, callbacks):
    """Cuts a `fit` off, a while after what it had begun to save is complete."""
    with pytest.raises(Killed):
        fit(model, data, callbacks)
    for thread in threading.enumerate():
        if thread.name == "replicax-checkpoint":
            thread.join(60)


def fit(model, data, callbacks):
    history = model.fit(**data, epochs=EPOCHS, callbacks=callbacks, verbose=0).history
    weights = [np.asarray(v.value) for v in (*model.weights, *model.optimizer.variables)]
    return {name: values[-1] for name, values in history.items()}, weights


@functools.cache
def undisturbed(make, strategy):
    return fit(build(strategy), make(strategy), [])


@pytest.fixture(scope="module")
def two():
    return rx.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize(
    ("make", "save_freq", "kills"),
    [
        (arrays, "epoch", [7]),
        (arrays, 2, [3, 4]),
        (arrays, 5, [5]),  # when all steps of an epoch had been made, but it was not over
        (dataset, 3, [8]),
        (endless, "epoch", [4]),
        (passes_of_their_own, 1, [4]),
    ],
)
def test_it_ends_as_if_nothing_had_happened(make, save_freq, kills, two, tmp_path):
    expected, weights = undisturbed(make, two)
    for after in kills:
        backup = rx.BackupAndRestore(tmp_path / "backup", save_freq)
        killed(build(two), make(two), [backup, Kill(after)])
    assert (tmp_path / "backup").exists()
    np.random.seed(123)  # another process would be somewhere else
    model, data = build(two), make(two)
    np.random.seed(123)
    ended, ended_weights = fit(model, data, [rx.BackupAndRestore(tmp_path / "backup", save_freq)])
    assert ended == expected
    for ours, theirs in zip(ended_weights, weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not (tmp_path / "backup").exists()


def test_a_model_without_a_strategy_and_another_number_of_replicas(two, tmp_path):
    default = rx.get_strategy()
    expected, weights = fit(build(default), arrays(default), [])
    killed(build(default), arrays(default), [rx.BackupAndRestore(tmp_path, 1), Kill(6)])
    ended, ended_weights = fit(build(two), arrays(two), [rx.BackupAndRestore(tmp_path, 1)])
    assert ended == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(ended_weights, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_is_in_order_again_after_a_failure(two, tmp_path):
    model = build(two)
    for after in (6, 1):  # the second time while steps are passed over
        killed(model, arrays(two), [rx.BackupAndRestore(tmp_path, 1), Kill(after)])
    before = int(model.optimizer.iterations.value)
    fit(model, arrays(two), [])
    assert int(model.optimizer.iterations.value) - before == EPOCHS * 5


@pytest.mark.parametrize("save_freq", [0, -1, "step", 1.5])
def test_a_wrong_frequency(save_freq, tmp_path):
    with pytest.raises(InvalidArgument, match="'epoch' or a positive number of steps"):
        rx.BackupAndRestore(tmp_path, save_freq)
