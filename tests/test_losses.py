"""The losses of replicas add up to the loss of one device on the whole batch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import equal, shares

import replicax as rx

_random = np.random.default_rng(0)
ROWS = 11  # which do not divide by 2, 3 or 8 replicas
X = _random.normal(size=(ROWS, 3)).astype(np.float32)
WEIGHTS = _random.uniform(0, 2, ROWS).astype(np.float32)


def summed(strategy, value):
    return strategy.reduce("SUM", value, axis=None) if strategy.num_replicas_in_sync > 1 else value


def test_parts_add_up_to_the_average(strategy, execution):
    even = X[:2].repeat(strategy.num_replicas_in_sync, 0)
    part = strategy.run(lambda x: rx.compute_average_loss(x[:, 0]), args=(shares(strategy, even),))
    equal(summed(strategy, part), even[:, 0].mean())


@pytest.mark.parametrize("rows", [ROWS, 2])  # with two rows, some replicas have none
@pytest.mark.parametrize("weighted", [False, True])
def test_uneven_shares(strategy, execution, rows, weighted):
    def part(x, w):
        return rx.compute_average_loss(x, w if weighted else None, global_batch_size=rows)

    x, w = X[:rows, 0], WEIGHTS[:rows]
    result = strategy.run(part, args=(shares(strategy, x), shares(strategy, w)))
    equal(summed(strategy, result), (x * w if weighted else x).sum() / rows)


def test_gradients_add_up(strategy, execution):
    with strategy.scope():
        weight = rx.Variable([1.0, 2.0, 3.0])

    def step(x, w):
        def loss_fn():
            losses = (x @ weight.value - 1) ** 2
            loss = rx.compute_average_loss(losses, w, global_batch_size=ROWS)
            return loss + rx.scale_regularization_loss(0.1 * weight**2)

        return rx.value_and_grad(loss_fn, weight)()

    loss, gradient = strategy.run(step, args=(shares(strategy, X), shares(strategy, WEIGHTS)))
    values = np.float32([1, 2, 3])
    errors = X @ values - 1
    equal(summed(strategy, loss), (WEIGHTS * errors**2).mean() + 0.1 * (values**2).sum(), 1e-5)
    expected = (2 * WEIGHTS * errors) @ X / ROWS + 0.2 * values
    equal(summed(strategy, gradient), expected, 1e-5)


def test_all_elements_are_added_and_the_rows_divide():
    equal(rx.compute_average_loss(X), X.sum() / ROWS)
    equal(rx.compute_average_loss(X, WEIGHTS), (X * WEIGHTS[:, None]).sum() / ROWS)
    equal(rx.compute_average_loss(X, 2), 2 * X.sum() / ROWS)
    equal(rx.compute_average_loss(np.array([1, 2])), 1.5)
    equal(rx.scale_regularization_loss(X), X.sum(), 1e-5)


def test_nothing_has_the_loss_zero():
    equal(rx.compute_average_loss(np.zeros(0, np.float32)), 0.0)
    equal(rx.compute_average_loss(X[:, 0], np.zeros(ROWS), global_batch_size=jnp.int32(0)), 0.0)


def test_the_dtype_is_that_of_the_losses_and_large_batches_do_not_overflow():
    loss = rx.compute_average_loss(jnp.full(8, 64, jnp.float16), global_batch_size=2**17)
    assert loss.dtype == jnp.float16
    equal(loss, 2.0**-8)


def test_the_batch_size_may_be_traced(two):
    step = rx.function(lambda x, n: rx.compute_average_loss(x, global_batch_size=n))
    equal(step(X[:, 0], jnp.int32(5)), X[:, 0].sum() / 5)


def test_replica_context_is_needed(two):
    with two.scope():
        with pytest.raises(RuntimeError, match=r"cross-replica context of MirroredStrategy\(2\)"):
            rx.compute_average_loss([1.0])
        with pytest.raises(RuntimeError, match="in the function given to `run`"):
            rx.scale_regularization_loss(1.0)
        equal(rx.compute_average_loss([1.0], global_batch_size=4), 0.25)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1.0,), "must have one loss per example; got a scalar of dtype float32"),
        (("loss",), "must be an array of real numbers; got a str"),
        ((X, WEIGHTS[:3]), r"shape \(3,\), which does not fit values of shape \(11, 3\)"),
        ((X, None, 1.5), r"whole number that is not negative; got float32\[\]"),
        ((X, None, -2), "got -2"),
        ((X, None, True), r"got bool\[\]"),
        ((X, None, [1, 2]), r"got int32\[2\]"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        rx.compute_average_loss(*arguments)
