"""Keras' own callbacks in `fit`, where several workers may have one path to write to."""

from __future__ import annotations

import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from conftest import STRATEGIES
from keras_models import LABELS, TABLE, dense, keras

import replicax as rx
from replicax import cluster
from replicax.errors import InvalidArgument, SaveFailed

try:  # here, because it sets an environment variable when it is first imported
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None

# Keras 3.15 converts its variables in a way that NumPy 2 warns of, for callbacks that ask for them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = TABLE[:20], LABELS[:20]


@pytest.fixture(params=[name for name in ("mirrored 2", "workers") if name in STRATEGIES])
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def shared(tmp_path):
    """A directory that all workers see: the first worker's."""
    return pathlib.Path(together(str(tmp_path))[0])


@pytest.fixture
def writes(monkeypatch):
    """The paths to which this process has written weights."""
    seen = []
    for name in ("save", "save_weights"):
        original = getattr(keras.Model, name)

        def noted(self, filepath, *args, original=original, **kwargs):
            seen.append(os.fspath(filepath))
            return original(self, filepath, *args, **kwargs)

        monkeypatch.setattr(keras.Model, name, noted)
    return seen


def together(value=None):
    """Return the values of all workers, which wait for each other."""
    session = cluster.session()
    return [value] if session is None else session.all_gather("a test", value)


def build(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense()
        model.build((None, 5))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(model, *callbacks, epochs=3):
    callbacks = list(callbacks)
    return model.fit(X, Y, batch_size=10, epochs=epochs, callbacks=callbacks, verbose=0)


def weights(model):
    return [np.asarray(variable.value) for variable in model.weights]


def require_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "{epoch}.keras"])
def test_checkpoints_are_written_once(name, strategy, shared, writes):
    model = build(strategy)
    only_weights = name.endswith("h5")
    checkpoint = keras.callbacks.ModelCheckpoint(
        shared / "new" / name, monitor="loss", save_best_only=True, save_weights_only=only_weights
    )
    history = fit(model, checkpoint).history
    assert checkpoint.best == pytest.approx(min(history["loss"]))
    assert len(writes) == (3 if rx.is_first_worker() else 0)
    path = str(shared / "new" / name).format(epoch=3)
    with strategy.scope():
        loaded = build(strategy) if only_weights else keras.saving.load_model(path)
    if only_weights:
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
    require_same(weights(loaded), weights(model))


def test_every_worker_may_have_a_path_of_its_own(strategy, tmp_path, writes):
    path = tmp_path / f"{len(together())}" / "model.keras"  # pytest's is one for each process
    fit(build(strategy), keras.callbacks.ModelCheckpoint(path), epochs=1)
    assert writes == [str(path)]
    together()


class Failing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_backups_are_written_once_and_restored_by_all(strategy, shared, writes):
    expected = weights_of_a_fit(strategy)
    directory = shared / "backup"
    with pytest.raises(KeyboardInterrupt):
        fit(build(strategy), keras.callbacks.BackupAndRestore(directory), Failing())
    assert len(writes) == (2 if rx.is_first_worker() else 0)
    together()
    assert sorted(os.listdir(directory)) == ["latest.weights.h5", "training_metadata.json"]
    together()
    model = build(strategy)
    keras.utils.set_random_seed(1)
    for _ in range(2):
        np.random.permutation(len(X))  # as Keras has shuffled twice
    history = fit(model, keras.callbacks.BackupAndRestore(directory))
    assert history.epoch == [2]
    require_same(weights(model), expected)
    assert not directory.exists()


def weights_of_a_fit(strategy):
    model = build(strategy)
    keras.utils.set_random_seed(1)
    fit(model)
    return weights(model)


def test_who_cannot_write_tells_all(strategy, shared):
    (shared / "file").write_text("in the way")
    checkpoint = keras.callbacks.ModelCheckpoint(shared / "file" / "model.keras")
    kind = OSError if rx.is_first_worker() else SaveFailed
    with pytest.raises(kind, match="file"):
        fit(build(strategy), checkpoint)
    together()


def test_workers_with_other_backups_are_told(strategy, tmp_path):
    """Each worker has a directory of its own, as on separate disks."""
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    fit(build(strategy), backup, epochs=1)
    together()
    if not rx.is_first_worker():
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    again = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    if len(together()) == 1:
        assert fit(build(strategy), again, epochs=2).epoch == [1]
        return
    with pytest.raises(InvalidArgument, match=r"begins with epoch 1, .* begins with epoch 0"):
        fit(build(strategy), again, epochs=2)
    together()


def test_tensorboard_without_tensorflow(two, tmp_path, monkeypatch):
    """The callback on the page about Keras writes what TensorBoard reads."""
    if SummaryWriter is None:
        pytest.skip("tensorboardX is not installed: pip install replicax[tensorboard]")
    page = (pathlib.Path(__file__).parents[2] / "docs" / "keras.md").read_text()
    (code,) = re.findall(r"```python\n(from tensorboardX.*?)```", page, re.DOTALL)
    names = {"keras": keras, "rx": rx}
    exec(code, names)
    monkeypatch.chdir(tmp_path)
    fit(build(two), names["Scalars"](), epochs=2)
    (file,) = (tmp_path / "logs").iterdir()
    assert [file.read_bytes().count(tag) for tag in (b"epoch_loss", b"epoch_accuracy")] == [2, 2]
