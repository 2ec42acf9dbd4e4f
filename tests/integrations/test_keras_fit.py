"""`fit`, `evaluate` and `predict` under a strategy equal those of plain Keras on one device."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import STRATEGIES
from keras_models import CASES, life, plain

import replicax as rx

# Keras 3.15 converts its variables in a way that NumPy 2 warns of, for callbacks that ask for them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# Sums over the rows of a batch are made in another order; float32 has 7 digits.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
MIXED = {"rtol": 0.03, "atol": 0.03}  # bfloat16 has 2 or 3


def require_equal(name, results):
    tolerance = MIXED if CASES[name].policy == "mixed_bfloat16" else TOLERANCE
    expected = plain(name)
    assert list(results) == list(expected)
    for what, value in results.items():
        np.testing.assert_allclose(
            value.astype(np.float64), expected[what].astype(np.float64), err_msg=what, **tolerance
        )


AMONG_WORKERS = ["dense", "a partial batch", "convolution", "dropout"]


@pytest.mark.parametrize("name", AMONG_WORKERS if "workers" in STRATEGIES else ["dense"])
def test_every_strategy_equals_one_device(name, strategy):
    require_equal(name, life(CASES[name], strategy))


SLOW = ("recurrent", "attention", "without jit_compile")  # to compile, or to run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in CASES
        if name != "dense"
    ],
)
def test_every_kind_of_model_equals_one_device(name):
    three = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])  # which no batch divides by
    require_equal(name, life(CASES[name], three))


def test_tpus():
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    rx.tpu.experimental.initialize_tpu_system(resolver)
    require_equal("dense", life(CASES["dense"], rx.TPUStrategy(resolver)))
