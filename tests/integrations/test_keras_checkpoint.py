"""Checkpoints of Keras models, optimizers and metrics."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import STRATEGIES, cpus
from keras_models import keras, layers
from support import equal

import replicax as rx

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X[:, :2] * 2.0


def build(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(2),
        ]
    )


def compiled(strategy: rx.Strategy, seed: int) -> keras.Model:
    with strategy.scope():
        model = build(seed)
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def state(model: keras.Model) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(variable.value) for variable in variables]


def fit(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> tuple[str, list[np.ndarray], list[float], list[np.ndarray]]:
    """A checkpoint, what is in it, and what came after it; saved while the fit went on."""
    model = compiled(rx.MirroredStrategy(cpus(2)), 0)
    fit(model)
    before = state(model)
    checkpoint = rx.Checkpoint(model=model, epoch=2)
    directory = tmp_path_factory.mktemp("fitted")
    with rx.CheckpointManager(checkpoint, directory, asynchronous=True) as manager:
        path = manager.save()
        losses = fit(model)
    assert path is not None
    return path, before, losses, state(model)


def test_a_fit_goes_on_exactly(fitted, two):
    path, before, losses, after = fitted
    # Keras numbers the layers of further models on, which must not matter; and the optimizer of a
    # model that was not trained has no slots.
    model = compiled(two, 1)
    checkpoint = rx.Checkpoint(model=model, epoch=0)
    report = checkpoint.restore(path).assert_consumed()
    assert checkpoint.epoch == 2
    assert "model/sequential/dense_1/kernel" in report.restored
    for ours, theirs in zip(state(model), before, strict=True):
        equal(ours, theirs, 0)
    assert fit(model) == losses
    for ours, theirs in zip(state(model), after, strict=True):
        equal(ours, theirs, 0)


def test_a_fit_goes_on_with_another_number_of_replicas(fitted):
    path, _, losses, _ = fitted
    model = compiled(rx.MirroredStrategy(cpus(4)), 1)
    rx.Checkpoint(model=model).restore(path)
    equal(fit(model), losses, 1e-4)


def test_parts_of_a_custom_loop(tmp_path, two):
    def make(seed):
        with two.scope():
            model = build(seed)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)
            loss = keras.metrics.Mean()
            free = keras.Variable(float(seed))
        return rx.Checkpoint(parts=[model, optimizer], loss=loss, free=free)

    checkpoint = make(1)
    checkpoint.loss.update_state(3.0)
    checkpoint.parts[1].apply([v.value + 1.0 for v in checkpoint.parts[0].trainable_variables])
    path = checkpoint.save(tmp_path / "model")
    other = make(2)
    other.restore(path).assert_consumed()
    assert (float(other.loss.result()), float(other.free)) == (3.0, 1.0)
    for ours, theirs in zip(other.parts[1].variables, checkpoint.parts[1].variables, strict=True):
        equal(ours.value, theirs.value, 0)


def test_what_is_not_built_says_what_to_do(tmp_path):
    model = build(0)

    def make():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())

    optimizer = make()
    optimizer.build(model.trainable_variables)
    path = rx.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "model")
    checkpoint = rx.Checkpoint(model=model, optimizer=make())
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"'optimizer' has no slots yet.*build"):
        checkpoint.restore(path)
    unbuilt = keras.Sequential([layers.Dense(5)])
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"'model' has no variables yet.*build"):
        rx.Checkpoint(model=unbuilt).restore(path)


def custom_loop(strategy: rx.Strategy, seed: int, compiled: bool = False):
    """A model and an optimizer that is not built, and a step that trains one by the other."""
    with strategy.scope():
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.01 * seed)

    def replica():
        gradients = [v.value for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    def step():
        strategy.run(replica)

    run = rx.function(step) if compiled else step

    def state():
        return [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]

    return rx.Checkpoint(model=model, optimizer=optimizer), run, state


def test_slots_of_an_optimizer_are_restored_when_it_makes_them(tmp_path, strategy):
    slots_are_restored(tmp_path, strategy, compiled=False)


@pytest.mark.parametrize("name", ["default", "mirrored 1", "mirrored 2"])
def test_slots_of_an_optimizer_are_restored_while_a_program_is_traced(tmp_path, name):
    slots_are_restored(tmp_path, STRATEGIES[name](), compiled=True)


def slots_are_restored(tmp_path, strategy: rx.Strategy, compiled: bool) -> None:
    checkpoint, step, state = custom_loop(strategy, 1)
    for _ in range(3):
        step()
    path = checkpoint.save(tmp_path / "model")
    for _ in range(2):
        step()
    other, step, other_state = custom_loop(strategy, 2, compiled)
    report = other.restore(path)
    assert len(report.deferred) == 4
    assert report.missing == report.unused == ()
    assert int(other.optimizer.iterations.value) == 3
    # What waits is saved too, should the next checkpoint come first.
    again = other.save(tmp_path / "model")
    for _ in range(2):
        step()
    report.assert_consumed()
    for ours, theirs in zip(other_state(), state(), strict=True):
        equal(ours, theirs, 1e-6 if compiled else 0)
    third, step, third_state = custom_loop(strategy, 3)
    third.restore(again)
    with strategy.scope():
        third.optimizer.build(third.model.trainable_variables)
    for _ in range(2):
        step()
    for ours, theirs in zip(third_state(), state(), strict=True):
        equal(ours, theirs, 0)


def test_slots_that_do_not_fit_are_told_when_they_are_made(tmp_path, two):
    checkpoint, step, _ = custom_loop(two, 1)
    step()
    path = checkpoint.save(tmp_path / "model")
    with two.scope():
        optimizer = keras.optimizers.Adam()
        other = keras.Sequential([layers.Input((3,)), layers.Dense(2)])
    waiting = rx.Checkpoint()
    report = waiting.restore(path)
    waiting.optimizer = optimizer
    assert len(report.deferred) == 4
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"is float32\[3, 2\] now"):
        optimizer.build(other.trainable_variables)
    # A checkpoint without slots leaves nothing to wait for.
    fresh, _, _ = custom_loop(two, 1)
    without = fresh.save(tmp_path / "fresh")
    with two.scope():
        optimizer = keras.optimizers.Adam()
    rx.Checkpoint(optimizer=optimizer).restore(path)
    rx.Checkpoint(optimizer=optimizer).restore(without).assert_existing_objects_matched()
    optimizer.build(other.trainable_variables)
    equal(optimizer.variables[2].value, np.zeros((3, 2)))


def heads(*names: str | None) -> keras.Model:
    """A layer for each name, with a kernel of ones, twos and so on."""
    each = [
        layers.Dense(2, name=name, kernel_initializer=keras.initializers.Constant(index + 1.0))
        for index, name in enumerate(names)
    ]
    return keras.Sequential([layers.Input((2,)), *each])


def kernels(model: keras.Model) -> list[float]:
    return [float(layer.kernel.value[0, 0]) for layer in model.layers]


def test_names_that_somebody_gave_are_kept(tmp_path):
    path = rx.Checkpoint(model=heads("head_1", None, "head_2", None)).save(tmp_path / "model")
    other = heads("head_2", None, "head_1", None)
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    assert kernels(other) == [3.0, 2.0, 1.0, 4.0]
    part = heads("head_2")
    report = rx.Checkpoint(model=part).restore(path)
    assert kernels(part) == [3.0]
    assert "model/sequential/head_1/kernel" in report.unused


def test_layers_in_layers_are_found_again(tmp_path):
    def make(seed):
        keras.utils.set_random_seed(seed)
        inner = keras.Sequential([layers.Input((3,)), layers.Dense(2), layers.Dense(2)])
        return keras.Sequential(
            [
                layers.Input((5, 4)),
                layers.Bidirectional(layers.LSTM(2)),
                layers.Dense(3),
                inner,
            ]
        )

    model, other = make(1), make(2)
    path = rx.Checkpoint(model=model).save(tmp_path / "model")
    rx.Checkpoint(model=other).restore(path).assert_consumed()
    for ours, theirs in zip(other.variables, model.variables, strict=True):
        equal(ours.value, theirs.value, 0)


def test_saved_after_every_step_of_a_fit(tmp_path, two):
    model = compiled(two, 0)
    manager = rx.CheckpointManager(rx.Checkpoint(model=model), tmp_path, None, asynchronous=True)
    bare = rx.Checkpoint(kernel=model.layers[0].kernel)
    seen = []

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                with pytest.raises(rx.errors.ContextError, match="jax_state_sync"):
                    bare.save(tmp_path / "bare")
            manager.save()
            seen.append(np.asarray(model.layers[0].kernel.value))

    model.fit(X, Y, batch_size=4, epochs=1, callbacks=[Save()], verbose=0)
    manager.close()
    assert len(seen) == len(manager.checkpoints) == 2
    other = compiled(two, 1)
    for path, kernel in zip(manager.checkpoints, seen, strict=True):
        rx.Checkpoint(model=other).restore(path)
        equal(other.layers[0].kernel.value, kernel, 0)
