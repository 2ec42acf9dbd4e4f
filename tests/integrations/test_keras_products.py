"""Programs of `fit` have no transposed products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from keras_models import keras  # noqa: F401  says so if it is not installed

from replicax.integrations.keras._products import without_transposed_products


def dense(weight, x):
    return jnp.sum(jnp.tanh(x @ weight) ** 2)


def batched(weight, x):
    return jnp.sum(jnp.einsum("bij,bjk->bik", x, weight) ** 2)


def looped(weight, x):
    return jax.lax.scan(lambda total, row: (total + dense(weight, row[None]), None), 0.0, x)[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "left"),
    [
        (dense, [(3, 4), (5, 3)], 0),
        (batched, [(2, 3, 4), (2, 5, 3)], 0),
        (looped, [(3, 4), (5, 3)], None),  # what is inside of a loop stays as it is
    ],
)
def test_gradients_are_the_same(fn, shapes, left):
    numbers = np.random.default_rng(0)
    arrays = [jnp.asarray(numbers.normal(size=shape), jnp.float32) for shape in shapes]
    gradient = jax.grad(fn)
    swapped = jax.jit(without_transposed_products(gradient))
    np.testing.assert_allclose(swapped(*arrays), gradient(*arrays), rtol=1e-6)
    if left is not None:
        assert str(jax.make_jaxpr(gradient)(*arrays)).count("transpose") > left
        assert (
            str(jax.make_jaxpr(without_transposed_products(gradient))(*arrays)).count("transpose[")
            == left
        )


def test_other_transpositions_stay():
    def fn(a, b):
        return jnp.transpose(jnp.einsum("bij,bjk->bik", a, b), (2, 0, 1)), (a[0] @ b[0]).T, a.T

    a, b = jnp.arange(12.0).reshape(2, 2, 3), jnp.arange(24.0).reshape(2, 3, 4)
    for ours, theirs in zip(without_transposed_products(fn)(a, b), fn(a, b), strict=True):
        np.testing.assert_array_equal(ours, theirs)
