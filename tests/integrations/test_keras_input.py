"""The input that `fit`, `evaluate` and `predict` accept, and that which they refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from conftest import STRATEGIES
from keras_models import BATCH, LABELS, ROWS, TABLE, dense, keras
from pipelines import TENSORFLOW, TORCH, require

import replicax as rx
from replicax.errors import CollectiveMismatch, InvalidArgument

# Keras warns of every dataset whose length shows only in reading it.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

BATCHES = [slice(start, start + BATCH) for start in range(0, ROWS, BATCH)]


def tf_data():
    require("tf.data")
    return TENSORFLOW.data.Dataset.from_tensor_slices((TABLE, LABELS)).batch(BATCH)


def grain_rows():
    return rx.from_tensor_slices((TABLE, LABELS)).batch(BATCH)


def torch_loader():
    require("torch")
    tensors = [TORCH.as_tensor(array) for array in (TABLE, LABELS)]
    dataset = TORCH.utils.data.TensorDataset(*tensors)
    return TORCH.utils.data.DataLoader(dataset, batch_size=BATCH)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return TABLE[BATCHES[index]], LABELS[BATCHES[index]]


def compiled(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def three():
    return rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


@pytest.fixture(scope="module")
def expected(three):
    model = compiled(three)
    history = model.fit(TABLE, LABELS, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    return history.history, model.predict(TABLE, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("make", [tf_data, grain_rows, torch_loader, Sequence])
@pytest.mark.parametrize("distributed", [False, True], ids=["as it is", "distributed"])
def test_every_kind_of_dataset_gives_the_same(make, distributed, three, expected):
    dataset = make()
    if distributed:
        if make is Sequence:
            dataset = [dataset[index] for index in range(len(dataset))]
        dataset = three.experimental_distribute_dataset(dataset)
    model = compiled(three)
    history = model.fit(dataset, epochs=2, verbose=0, shuffle=False, validation_data=dataset)
    for name, values in expected[0].items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    loss, accuracy = model.evaluate(dataset, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(loss)
    assert history.history["val_accuracy"][-1] == pytest.approx(accuracy)
    np.testing.assert_allclose(model.predict(dataset, verbose=0), expected[1], rtol=1e-4)


def test_a_dataset_made_by_a_function_as_on_the_reference_page(two):
    with two.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(learning_rate=0.1)
    seen = []

    def dataset_fn(context):
        seen.append(context.get_per_replica_batch_size(2))
        x = np.arange(10, dtype=np.float32).reshape(2, 5) / 10
        y = np.int32([[0], [1]])
        return rx.from_tensor_slices((x, y)).repeat().batch(1, drop_remainder=True)

    dataset = two.distribute_datasets_from_function(dataset_fn)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    with pytest.raises(InvalidArgument, match=r"never ends.*steps_per_epoch"):
        model.fit(dataset, verbose=0)
    history = model.fit(dataset, verbose=0, steps_per_epoch=5, epochs=2)
    assert seen == [1]
    assert int(optimizer.iterations.value) == 10
    assert history.history["loss"][1] < history.history["loss"][0]


def test_uneven_elements_of_a_distributed_dataset_count_once(three):
    """The last element has 4 rows: 2, 2 and none."""
    batches = [(TABLE[:6], LABELS[:6]), (TABLE[6:10], LABELS[6:10])]
    model = compiled(three)
    dataset = three.experimental_distribute_dataset(batches)
    loss, accuracy = model.evaluate(dataset, verbose=0)
    both = model.evaluate(TABLE[:10], LABELS[:10], batch_size=10, verbose=0)
    np.testing.assert_allclose([loss, accuracy], both, rtol=1e-6)
    assert model.predict(dataset, verbose=0).shape == (10, 3)


def test_shares_of_any_size(three):
    """A dataset that gives the replicas different numbers of rows, the first replica most."""
    parts = [np.full((count, 5), value, np.float32) for count, value in ((4, 1), (1, 2), (1, 3))]
    dataset = three.distribute_datasets_from_function(lambda context: parts)
    with three.scope():
        model = keras.Sequential([keras.layers.Lambda(lambda x: x[:, :1])])
    predicted = model.predict(dataset, verbose=0)  # of a model that was never compiled
    assert predicted.ravel().tolist() == [1, 1, 1, 1, 2, 3]


def test_what_keras_reads_ahead_on_accelerators(three, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for data in (grain_rows(), three.experimental_distribute_dataset(grain_rows())):
        history = compiled(three).fit(data, epochs=1, verbose=0, shuffle=False).history
        np.testing.assert_allclose(history["loss"], expected[0]["loss"][:1], rtol=1e-5)


@pytest.fixture(params=[name for name in ("mirrored 2", "workers") if name in STRATEGIES])
def strategy(request):
    return STRATEGIES[request.param]()


def test_workers_share_a_dataset_and_have_the_same_of_everything_else(strategy):
    model = compiled(strategy)
    by_rows = rx.InputOptions(auto_shard_policy="DATA")
    dataset = strategy.experimental_distribute_dataset(grain_rows(), by_rows)
    shared = model.fit(dataset, verbose=0).history
    # With other numbers drawn on every worker, all take the order of the first.
    alike = compiled(strategy)
    np.random.seed(jax.process_index())
    shuffled = alike.fit(TABLE, LABELS, batch_size=ROWS, verbose=0).history
    plain = compiled(rx.get_strategy())
    expected = plain.fit(TABLE, LABELS, batch_size=BATCH, shuffle=False, verbose=0).history
    assert shared["loss"] == pytest.approx(expected["loss"])
    whole = compiled(rx.get_strategy())
    expected = whole.fit(TABLE, LABELS, batch_size=ROWS, verbose=0).history
    assert shuffled["loss"] == pytest.approx(expected["loss"])


def test_workers_with_other_arrays_are_told(strategy):
    model, own = compiled(strategy), TABLE[: 10 + jax.process_index()]
    if jax.process_count() == 1:
        model.evaluate(own, LABELS[: len(own)], verbose=0)
        return
    with pytest.raises(
        CollectiveMismatch, match=r"same `x`: .* float32\[10, 5\].* float32\[11, 5\]"
    ):
        model.evaluate(own, LABELS[: len(own)], verbose=0)


def test_on_batch_methods(three):
    model, plain = compiled(three), compiled(rx.get_strategy())
    for _ in range(2):
        ours, theirs = (m.train_on_batch(TABLE[:10], LABELS[:10]) for m in (model, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ours, theirs = (m.test_on_batch(TABLE[:7], LABELS[:7]) for m in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ours, theirs = (m.predict_on_batch(TABLE[:7]) for m in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("argument", ["y", "sample_weight", "class_weight"])
def test_what_belongs_into_the_dataset_is_refused_beside_it(argument, two):
    dataset = two.experimental_distribute_dataset([(TABLE[:4], LABELS[:4])])
    with pytest.raises(InvalidArgument, match=f"a distributed dataset and `{argument}`"):
        compiled(two).fit(dataset, **{argument: LABELS[:4]})


def test_datasets_of_others_are_refused(two, three):
    dataset = two.experimental_distribute_dataset([(TABLE[:4], LABELS[:4])])
    with pytest.raises(InvalidArgument, match="Distribute the dataset with the model's strategy"):
        compiled(three).fit(dataset)
    with pytest.raises(InvalidArgument, match="outside of every strategy's scope"):
        compiled(rx.get_strategy()).fit(dataset)
