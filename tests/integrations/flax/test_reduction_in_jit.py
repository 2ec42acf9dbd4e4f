"""Code that JAX has traced inside a step is traced again for another gradient reduction."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx


class Weight(nnx.Module):
    def __init__(self):
        self.value = nnx.Param(np.zeros((), np.float32))


@pytest.mark.parametrize("wrap", [lambda step: step, nnx.jit], ids=["step", "nnx.jit"])
def test_a_change_of_the_reduction_reaches_what_is_jitted_in_the_step(two, wrap):
    model = Weight()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    @rx.function
    @wrap
    def step(model, optimizer, rows):
        gradients = nnx.grad(lambda model: (rows * model.value[...]).mean())(model)
        optimizer.update(model, gradients)

    def change(rows):
        before = float(model.value[...])
        two.run(step, args=(model, optimizer, two.split(rows)))
        return float(model.value[...]) - before

    even, uneven = np.float32([1, 1, 4, 4]), np.float32([1, 1, 4])
    assert change(even) == pytest.approx(-5.0)
    two.gradient_reduction = "MEAN"
    assert change(even) == pytest.approx(-2.5)
    assert change(uneven) == pytest.approx(-2.0)
    two.gradient_reduction = rx.GradientReduction.SUM
    assert change(uneven) == pytest.approx(-5.0)
