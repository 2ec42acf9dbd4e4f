"""`rx.audit` of steps with NNX objects, whose state is put back after the eager run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax_models import X, Y, made, numbers, over, quick_step, shared

import replicax as rx


@over("default", "mirrored 1", "mirrored 2")
def test_a_step_with_dropout_and_batch_statistics(strategy):
    audited, plain = made(norm=True, rate=0.5), made(norm=True, rate=0.5)

    def step_of(objects):
        @rx.function
        def step(x, y):
            return strategy.run(lambda x, y: quick_step(*objects, x, y), args=(x, y))

        return step

    audited_step, plain_step = step_of(audited), step_of(plain)
    (batch,) = shared(strategy, (X, Y))
    for _ in range(2):
        report = rx.audit(audited_step, *batch)
        assert report.ok, str(report)
        assert report.compared > 10
        plain_step(*batch)
    np.testing.assert_equal(numbers(*audited), numbers(*plain))


@over("default", "mirrored 2")
def test_what_a_function_writes_outside_of_run(strategy):
    model, _, _ = made()

    @rx.function
    def step(x):
        model.first.bias[...] += jnp.ones(6)
        return strategy.run(lambda x: model(x).sum(), args=(x,))

    before = np.asarray(model.first.bias[...])
    (batch,) = shared(strategy, (X,))
    for count in (1, 2):
        report = rx.audit(step, *batch)
        assert report.ok, str(report)
        np.testing.assert_allclose(model.first.bias[...], before + count)
