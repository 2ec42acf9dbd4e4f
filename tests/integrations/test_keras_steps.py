"""The compiled steps of a model, and the signatures that they may have."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import STRATEGIES
from keras_models import LABELS, TABLE, Adversaries, StatefulAutoencoder, keras, layers, plain

import replicax as rx
from replicax.errors import InvalidArgument, PerformanceHint

# Keras 3.15 converts its variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STEPS = 5


@keras.saving.register_keras_serializable("tests")
class Counting(layers.Layer):
    """A layer that Keras does not compile, and JAX can; it counts how often it is called."""

    calls = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            Counting.calls += 1
        return x


class Crooked(Counting):
    """A layer that JAX cannot trace when it trains; so is `RandomCrop`."""

    def call(self, x, training=False):
        return super().call(x) * (1 if not training or float(x[0, 0]) > 0 else 2)


def build(strategy, layer):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return keras.Sequential([keras.Input((5,)), layer, layers.Dense(3, activation="softmax")])


def is_compiled(model):
    """Fit it for some steps, and say whether Python ran for fewer."""
    Counting.calls = 0
    model.fit(TABLE[:20], LABELS[:20], batch_size=20 // STEPS, verbose=0)
    return Counting.calls < STEPS


LOSS = "sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({}, True), ({"jit_compile": False}, False), ({"run_eagerly": True}, False)],
    ids=str,
)
def test_what_keras_does_not_compile_is_compiled_unless_the_user_says_no(options, compiled, two):
    model = build(two, Counting())
    model.compile("sgd", LOSS, **options)
    assert is_compiled(model) is compiled
    model.compile("sgd", LOSS)
    assert is_compiled(model)


def test_a_loaded_model_is_compiled_too(two, tmp_path):
    """Its file has what "auto" came to in Keras, which is False."""
    model = build(two, Counting())
    model.compile("sgd", LOSS)
    model.save(tmp_path / "model.keras")
    with two.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.compiled
    assert not loaded.jit_compile
    assert is_compiled(loaded)


def test_a_layer_that_cannot_be_traced_is_named(two):
    model = build(two, Crooked(name="crooked"))
    model.compile("sgd", LOSS)
    pattern = (
        r"`train_step` of 'sequential\w*' is not compiled.*'crooked' \(Crooked\).*dataset\.map"
    )
    with pytest.warns(PerformanceHint, match=pattern):
        assert not is_compiled(model)
    alone = build(rx.get_strategy(), Crooked())
    alone.compile("sgd", LOSS)
    assert not is_compiled(alone)
    for ours, theirs in zip(model.weights, alone.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), np.asarray(theirs.value), rtol=1e-4)


def test_a_mistake_is_raised_as_it_is(two):
    model = build(two, Counting())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="shape"):  # without a hint that layers were at fault
        model.fit(TABLE[:4], np.ones((4, 2, 7), np.float32), verbose=0)


@pytest.fixture(params=[name for name in ("mirrored 3", "workers") if name in STRATEGIES])
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_distributed_dataset_and_eager_steps_give_the_same(eagerly, strategy):
    rows = rx.from_tensor_slices(TABLE).batch(10)
    by_rows = rx.InputOptions(auto_shard_policy="DATA")
    data = strategy.experimental_distribute_dataset(rows, by_rows)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = StatefulAutoencoder()
    model.compile(keras.optimizers.Adam(0.01), run_eagerly=eagerly)
    history = model.fit(data, epochs=2, verbose=0).history
    expected = plain("VAE, stateful, a partial batch")["history: total"]
    np.testing.assert_allclose(history["total"], expected, rtol=2e-4)


def test_what_a_step_makes_is_kept_on_all_devices(two):
    with two.scope():
        model = Adversaries()
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(TABLE[:10], verbose=0)
    slots = model.forger_optimizer.variables
    assert len(slots) == 10
    assert {len(variable.value.devices()) for variable in slots} == {2}


def test_a_step_of_the_data_alone_makes_predictions(two):
    class Doubling(keras.Model):
        def call(self, x):
            return x

        def predict_step(self, data):
            return 2 * self(data)

    with two.scope():
        model = Doubling()
    np.testing.assert_array_equal(model.predict(TABLE, batch_size=10, verbose=0), 2 * TABLE)


def test_other_signatures_are_refused(two):
    class Wrong(keras.Model):
        def call(self, x):
            return x

        def train_step(self, state, data, extra):
            return {}

    with two.scope():
        model = Wrong()
    model.compile("sgd", "mse")
    pattern = r"Received: `train_step\(state, data, extra\)`.*`train_step\(self, data\)`"
    with pytest.raises(InvalidArgument, match=pattern):
        model.fit(TABLE, TABLE, verbose=0)
