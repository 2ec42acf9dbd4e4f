"""Metrics equal NumPy on the whole data, however it is divided."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica, shares

import replicax as rx

_random = np.random.default_rng(0)
# 11 rows do not divide by 2, 3 or 8 replicas, and 2 rows leave some without any.
BATCHES = [_random.normal(size=(rows, 3)).astype(np.float32) for rows in (11, 8, 2)]
WEIGHTS = [_random.uniform(0, 2, batch.shape[:1]).astype(np.float32) for batch in BATCHES]
LABELS = [_random.integers(0, 3, 2 * [rows]) for rows in (11, 8, 2)]
PREDICTED = [_random.integers(0, 3, 2 * [rows]) for rows in (11, 8, 2)]


def test_a_mean_is_that_of_the_whole_data(strategy, execution):
    with strategy.scope():
        mean, total = rx.metrics.Mean(), rx.metrics.Sum()

    def step(x):
        mean.update_state(x)
        total.update_state(x)

    for batch in BATCHES:
        strategy.run(step, args=(shares(strategy, batch),))
    data = np.concatenate(BATCHES)
    equal(mean.result(), data.mean())
    equal(total.result(), data.sum(), 1e-5)


@pytest.mark.parametrize("per", ["row", "element"])
def test_weights(strategy, execution, per):
    with strategy.scope():
        mean, total = rx.metrics.Mean(), rx.metrics.Sum()
    weights = [
        w if per == "row" else w[:, None] * batch**2
        for w, batch in zip(WEIGHTS, BATCHES, strict=True)
    ]

    def step(x, w):
        mean.update_state(x, sample_weight=w)
        total.update_state(x, w)

    for batch, weight in zip(BATCHES, weights, strict=True):
        strategy.run(step, args=(shares(strategy, batch), shares(strategy, weight)))
    data, weight = np.concatenate(BATCHES), np.concatenate(weights)
    weight = np.broadcast_to(weight.reshape(len(data), -1), data.shape)
    equal(mean.result(), np.average(data, weights=weight), 1e-5)
    equal(total.result(), (data * weight).sum(), 1e-5)


def test_the_accuracy_is_that_of_the_whole_data(strategy, execution):
    with strategy.scope():
        plain, weighted = rx.metrics.Accuracy(), rx.metrics.Accuracy("weighted")

    def step(y, predicted, w):
        plain.update_state(y, predicted)
        weighted.update_state(y, predicted, w)

    for batch in zip(LABELS, PREDICTED, WEIGHTS, strict=True):
        strategy.run(step, args=tuple(shares(strategy, each) for each in batch))
    hits = [y == p for y, p in zip(LABELS, PREDICTED, strict=True)]
    equal(plain.result(), np.concatenate([each.ravel() for each in hits]).mean())
    weights = [np.repeat(w, len(w)) for w in WEIGHTS]
    expected = np.average(
        np.concatenate([each.ravel() for each in hits]), weights=np.concatenate(weights)
    )
    equal(weighted.result(), expected, 1e-5)


def test_in_run_the_result_is_the_replicas_own(strategy, execution):
    with strategy.scope():
        metric = rx.metrics.Mean()
    parts = np.array_split(BATCHES[0], strategy.num_replicas_in_sync)
    result = strategy.run(metric, args=(shares(strategy, BATCHES[0]),))
    components_equal(strategy, result, [part.mean() for part in parts])
    equal(metric.result(), BATCHES[0].mean())


def test_outside_of_run_a_value_counts_once(strategy, execution):
    with strategy.scope():
        metric = rx.metrics.Mean()
        equal(metric(np.float32([1, 2, 3])), 2.0)
        metric.update_state(5.0, sample_weight=3)
    metric.update_state(shares(strategy, np.full(6, 10, np.float32)))
    equal(metric.result(), (1 + 2 + 3 + 5 * 3 + 60) / 12)


def test_nothing_has_the_mean_zero(strategy, execution):
    with strategy.scope():
        metric = rx.metrics.Mean()
    equal(metric.result(), 0.0)
    strategy.run(metric.update_state, args=(shares(strategy, np.zeros((0, 3), np.float32)),))
    equal(metric.result(), 0.0)


def test_resetting(strategy, execution):
    with strategy.scope():
        metric = rx.metrics.Accuracy()
    for reset in (
        metric.reset_state,
        metric.reset_states,
        lambda: strategy.run(metric.reset_state),
    ):
        metric.update_state([1, 2], [1, 3])
        equal(metric.result(), 0.5)
        reset()
        equal(metric.result(), 0.0)
        equal(metric.variables[1], 0.0)


def test_in_a_compiled_epoch(strategy):
    with strategy.scope():
        metric = rx.metrics.Mean()
    replicas = strategy.num_replicas_in_sync
    data = _random.normal(size=(2, 3 * replicas)).astype(np.float32)

    @rx.function
    def epoch(first, second):
        for x in (first, second):
            strategy.run(metric.update_state, args=(x,))
        metric.update_state(jnp.float32(7))
        return metric.result()

    for _ in range(2):
        equal(epoch(*(shares(strategy, each) for each in data)), np.mean([*data.ravel(), 7]), 1e-5)
        metric.reset_state()


def test_numbers_need_no_programs_of_their_own():
    strategy = rx.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local"))
    with strategy.scope():
        metric = rx.metrics.Mean()
    for number in range(20):  # there is a hint, which is an error here, at the eleventh program
        metric.update_state(number)
        metric.update_state([float(number)])
    equal(metric.result(), 9.5)


def test_updates_need_no_communication(two):
    with two.scope():
        metric = rx.metrics.Mean()
    step = rx.function(lambda x, w: two.run(metric.update_state, args=(x, w)))
    x = shares(two, BATCHES[1])
    assert "all_reduce" not in step.lower(x, x).as_text()


def test_in_a_differentiated_function(strategy, execution):
    with strategy.scope():
        metric, weight = rx.metrics.Mean(), rx.Variable(2.0)

    def step(x):
        def loss_fn():
            losses = x * weight
            metric.update_state(losses)
            return losses.sum()

        return rx.grad(loss_fn, weight)()

    strategy.run(step, args=(shares(strategy, BATCHES[0]),))
    equal(metric.result(), 2 * BATCHES[0].mean(), 1e-5)


@pytest.mark.one_process
def test_checkpoints_hold_them_for_any_number_of_replicas(strategy, tmp_path):
    with strategy.scope():
        metric = rx.metrics.Mean()
    strategy.run(metric.update_state, args=(shares(strategy, BATCHES[0]),))
    path = rx.Checkpoint(loss=metric).save(tmp_path / "checkpoint")
    with rx.MirroredStrategy(["CPU:4", "CPU:5", "CPU:6"]).scope():
        other = rx.metrics.Mean("another name")
    rx.Checkpoint(loss=other).restore(path)
    equal(other.result(), BATCHES[0].mean(), 1e-5)


def test_names_and_dtypes():
    assert [(m.name, m.dtype) for m in (rx.metrics.Mean(), rx.metrics.Sum("s", jnp.bfloat16))] == [
        ("mean", jnp.float32),
        ("s", jnp.bfloat16),
    ]
    accuracy = rx.metrics.Accuracy(dtype="float16")
    assert accuracy([1], [1]).dtype == jnp.float16
    assert repr(accuracy) == "<rx.metrics.Accuracy 'accuracy'>"
    assert [v.name for v in accuracy.variables] == ["accuracy/total", "accuracy/count"]
    assert rx.metrics.Mean(dtype="float64").dtype == jnp.float32  # as of any array of JAX
    with jax.enable_x64(True):
        assert rx.metrics.Mean().dtype == jnp.float64
    many = rx.metrics.Mean()
    many.update_state(jnp.ones(1000, jnp.bfloat16))  # whose own sum would end at 256
    equal(many.result(), 1.0)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (lambda m: m.update_state("word"), "must be an array of real numbers; got a str"),
        (lambda m: m.update_state(jnp.array([1j])), r"got complex64\[1\]"),
        (
            lambda m: m.update_state(np.ones((3, 2)), np.ones(2)),
            r"shape \(2,\), which does not fit",
        ),
        (lambda m: m.update_state(np.ones(3), np.ones((3, 1))), r"does not fit values of shape"),
        (lambda m: m.update_state(np.ones(1), np.ones(3)), "one weight for all, one per row"),
        (lambda m: rx.metrics.Accuracy().update_state(np.ones((3, 1)), np.ones(3)), "argmax"),
        (lambda m: rx.metrics.Mean(dtype="int32"), "must have a floating point dtype; got int32"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(two, update, said):
    with two.scope():
        metric = rx.metrics.Mean()
        metric.update_state([1.0, 2.0])
    with pytest.raises(ValueError, match=said):
        update(metric)
    equal(metric.result(), 1.5)
    equal(metric.variables[1], 2.0)


def test_metrics_belong_to_their_strategy(two):
    metric = rx.metrics.Mean()
    with pytest.raises(rx.errors.ForeignValue, match="belongs to another strategy"):
        metric.update_state(per_replica(two, [1.0, 2.0]))
    with pytest.raises(rx.errors.ContextError, match="cannot be written by 2 replicas"):
        two.run(metric.update_state, args=(1.0,))
    with two.scope():
        metric = rx.metrics.Mean()
    with rx.OneDeviceStrategy("CPU:0").scope(), pytest.raises(rx.errors.ContextError):
        metric.update_state(1.0)
