"""Keras models, optimizers and metrics in custom loops, as the reference's pages have them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from keras_models import LABELS, TABLE, dropout, keras, layers

import replicax as rx
from replicax.errors import AggregationRequired, ContextError

GLOBAL_BATCH = 12
X, Y = TABLE[:GLOBAL_BATCH], LABELS[:GLOBAL_BATCH].astype(np.int32)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)])
    return model, keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.SparseCategoricalAccuracy()


def step_of(model, optimizer, accuracy):
    def step(x, y):
        def loss():
            logits = model(x, training=True)
            return jnp.sum(cross_entropy(y, logits)) / GLOBAL_BATCH, logits

        (value, logits), gradients = rx.value_and_grad(
            loss, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return value, accuracy.result()

    return step


@functools.cache
def expected(steps):
    """Plain Keras on one device, with the whole batch."""
    model, optimizer, accuracy = build()
    model.build((None, 5))
    losses = []
    for _ in range(steps):
        step = step_of(model, optimizer, accuracy)
        losses.append(step(X, Y)[0])
    return np.array(losses), [np.asarray(v) for v in model.weights], float(accuracy.result())


def test_a_loop_equals_one_device(strategy, execution):
    with strategy.scope():
        model, optimizer, accuracy = build()
        model.build((None, 5))
    step = step_of(model, optimizer, accuracy)
    by_rows = rx.InputOptions(auto_shard_policy="DATA")
    batches = strategy.experimental_distribute_dataset([(X, Y)] * 2, by_rows)
    losses, results = [], []
    for batch in batches:
        loss, result = strategy.run(step, args=batch)
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
        results.append(strategy.experimental_local_results(result)[0])
    wanted_losses, weights, wanted_accuracy = expected(2)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for variable, weight in zip(model.weights, weights, strict=True):
        np.testing.assert_allclose(np.asarray(variable.value), weight, rtol=2e-4, atol=2e-5)
    assert float(accuracy.result()) == pytest.approx(wanted_accuracy)
    assert float(results[-1]) == pytest.approx(wanted_accuracy)  # of all replicas, also inside
    assert int(optimizer.iterations.value) == 2
    accuracy.reset_state()
    assert float(accuracy.total.value) == 0


def test_models_and_slots_may_be_built_inside_of_a_step(mirrored_strategy, execution):
    with mirrored_strategy.scope():
        model, optimizer, accuracy = build()
    step = step_of(model, optimizer, accuracy)

    def building_step(x, y):
        model(x)
        return step(x, y)

    for batch in mirrored_strategy.experimental_distribute_dataset([(X, Y)]):
        mirrored_strategy.run(building_step, args=batch)
    assert [v.shape for v in model.weights] == [(5, 6), (6,), (6, 3), (3,)]
    for variable in (*model.weights, *optimizer.variables):
        assert len(variable.value.devices()) == mirrored_strategy.num_replicas_in_sync


def test_replicas_draw_numbers_of_their_own(two, execution):
    with two.scope():
        model = dropout()
    ones = np.ones((2, 5), np.float32)
    state = model.non_trainable_variables[0]
    layer = next(each for each in model.layers if "dropout" in each.name)
    first = two.run(lambda: layer(jnp.ones(64), training=True)).values
    assert not np.array_equal(*first)
    second = two.run(lambda: layer(jnp.ones(64), training=True)).values
    assert not np.array_equal(first[0], second[0])
    assert np.asarray(state.value).tolist() == [7, 2]  # the seed, and how often it was used
    # The first replica draws what one device would.
    alone = dropout()
    own = next(each for each in alone.layers if "dropout" in each.name)
    np.testing.assert_array_equal(first[0], own(jnp.ones(64), training=True))
    np.testing.assert_array_equal(model(ones), model(ones, training=False))


def test_running_averages_are_those_of_all_replicas(two, execution):
    with two.scope():
        normalization = layers.BatchNormalization(momentum=0.5)
        normalization.build((None, 1))
    rows = two.experimental_distribute_values_from_function(
        lambda context: jnp.full((4, 1), 2.0 * context.replica_id_in_sync_group)
    )

    def step(x):
        value, _ = rx.value_and_grad(
            lambda: jnp.sum(normalization(x, training=True)), normalization.trainable_variables
        )()
        return value

    two.run(step, args=(rows,))
    assert np.asarray(normalization.moving_mean.value).tolist() == [0.5]  # half of the mean, 1
    assert np.asarray(normalization.moving_variance.value).tolist() == [0.5]


def test_a_failing_step_leaves_everything_as_it_was(two, execution):
    with two.scope():
        counter = keras.Variable(1.0, trainable=False, aggregation="sum")

    def step():
        counter.assign_add(1.0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        two.run(step)
    assert float(counter.value) == 1
    two.run(lambda: counter.assign_add(1.0))
    assert float(counter.value) == 3


def test_what_cannot_be_written_says_why(two, execution):
    weight = keras.Variable(1.0)
    with pytest.raises(ContextError, match=r"cannot be written by 2 replicas.*strategy\.scope"):
        two.run(lambda: weight.assign(2.0))
    with two.scope():
        weight = keras.Variable(1.0)
    with pytest.raises(AggregationRequired, match="has no `aggregation`"):
        two.run(lambda: weight.assign(2.0))
    assert float(weight.value) == 1


def test_without_a_strategy_functions_compile_and_differentiate():
    weight = keras.Variable(3.0)
    count = keras.Variable(0, dtype="int32", trainable=False)

    @rx.function
    def step(x):
        count.assign_add(1)
        return rx.value_and_grad(lambda: x * weight**2, weight)()

    for number in (1, 2):
        value, gradient = step(2.0)
        assert (float(value), float(gradient), int(count.value)) == (18.0, 12.0, number)
    weight.assign(1.0)  # which a compiled function sees
    assert float(step(2.0)[0]) == 2
    assert step.tracing_count == 1


def test_gradients_are_clipped_after_they_are_summed(two, execution):
    with two.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0, clipvalue=1.5)
    two.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), weight)]))
    assert float(weight.value) == -1.5


def test_metrics_begin_again_inside_of_a_step(two, execution):
    with two.scope():
        mean = keras.metrics.Mean()
    two.run(lambda: mean.update_state(3.0))
    two.run(mean.reset_state)
    assert (float(mean.total.value), float(mean.count.value)) == (0, 0)

    def step():
        mean.reset_state()
        mean.update_state(5.0)
        return mean.result()

    for _ in range(2):
        assert [float(value) for value in two.run(step).values] == [5, 5]
    assert float(mean.count.value) == 2


@pytest.mark.parametrize("name", ["Nadam", "Adafactor"])
def test_optimizers_that_make_variables_of_numbers(name, two, execution):
    with two.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = getattr(keras.optimizers, name)(0.1)
    two.run(lambda: optimizer.apply_gradients([(jnp.ones(2), weight)]))
    plain = keras.Variable([1.0, 2.0])
    alone = getattr(keras.optimizers, name)(0.1)
    alone.apply_gradients([(2 * jnp.ones(2), plain)])
    np.testing.assert_allclose(np.asarray(weight.value), np.asarray(plain.value), rtol=1e-5)


def test_loss_scaling_looks_at_the_sum_of_all_replicas(two):
    with two.scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
    own = two.experimental_distribute_values_from_function(
        lambda context: np.float32(np.inf if context.replica_id_in_sync_group else 4.0)
    )

    @rx.function  # eagerly, Keras' own conditions do not work on JAX, with or without a strategy
    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    two.run(step, args=(own,))
    assert np.asarray(weight.value).tolist() == 1  # the step was left out by both
    assert float(optimizer.dynamic_scale.value) == 4
    two.run(step, args=(np.float32(2.0),))
    assert float(weight.value) == 0  # each replica has 2 / 4 of a gradient


def test_an_apply_of_a_subclass_gets_sums(two, execution):
    class Signs(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            return super().apply([jnp.sign(each) for each in grads], trainable_variables)

    with two.scope():
        weight, optimizer = keras.Variable(0.0), Signs(1.0)
    two.run(lambda: optimizer.apply_gradients([(jnp.float32(3.0), weight)]))
    assert float(weight.value) == -1


def test_numbers_without_a_seed(two):
    with two.scope():
        pass
    first, second = two.run(lambda: keras.random.normal((3,))).values
    assert not np.array_equal(first, second)


def test_uneven_steps_are_one_program(two):
    batches = [(X[:5], Y[:5]), (X[:1], Y[:1]), (X[:5], Y[:5])]

    def made():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)])
        model.build((None, 5))
        return model, keras.optimizers.Adam(0.1), keras.metrics.SparseCategoricalAccuracy()

    one = rx.OneDeviceStrategy("CPU:0")
    with one.scope():
        alone = made()
    whole = rx.function(step_of(*alone))
    expected = [float(one.run(whole, args=batch)[0]) for batch in batches]
    with two.scope():
        ours = made()
    step, calls = step_of(*ours), []

    def counted(x, y):
        calls.append(x.shape[0])
        return step(x, y)[0]

    @rx.function
    def train(iterator):
        return two.reduce("SUM", two.run(counted, args=next(iterator)), axis=None)

    iterator = iter(two.experimental_distribute_dataset(batches))
    losses = [float(train(iterator)) for _ in batches]
    iterator.close()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert calls == [3, 2, 3, 2, 1, 0, 1, 0], "in two passes each, and never eager"
    assert train.tracing_count == 2
    for mine, others in zip(ours[0].weights, alone[0].weights, strict=True):
        np.testing.assert_allclose(mine.value, others.value, rtol=2e-4, atol=2e-5)
    assert float(ours[2].result()) == pytest.approx(float(alone[2].result()))


def test_layers_with_a_state_of_their_own_on_uneven_shares(two):
    """Statistics of all rows and of a replica's own, and what replicas draw."""
    states = []
    for wrap in (lambda fn: fn, rx.function):
        keras.utils.set_random_seed(2)
        with two.scope():
            model = keras.Sequential(
                [
                    layers.BatchNormalization(synchronized=True),
                    layers.Dense(4),
                    layers.BatchNormalization(),
                    layers.Dropout(0.5, seed=3),
                ]
            )
            model.build((None, 5))

        def step(x, model=model):
            return model(x, training=True)

        rows = two.experimental_distribute_values_from_function(
            lambda context: X[:3] if context.replica_id_in_sync_group == 0 else X[3:5]
        )
        compiled = wrap(step)
        result = two.run(compiled, args=(rows,))
        weights = [np.asarray(each.value) for each in model.weights]
        states.append((two.gather(result, axis=0), weights))
    assert compiled.tracing_count == 1
    (eager, eager_weights), (ours, weights) = states
    np.testing.assert_allclose(ours, eager, rtol=1e-5, atol=1e-6)
    for mine, others in zip(weights, eager_weights, strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-5, atol=1e-6)
