"""`fit`, `evaluate` and `predict` under a strategy equal those of plain Keras on one device."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from conftest import STRATEGIES, cpus
from keras_models import CASES, life, plain

import replicax as rx
from replicax.execution import _compiled_program
from replicax.integrations.keras import _steps

# Keras 3.15 converts its variables in a way that NumPy 2 warns of, for callbacks that ask for them.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

# Sums over the rows of a batch are made in another order; float32 has 7 digits.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
MIXED = {"rtol": 0.03, "atol": 0.03}  # bfloat16 has 2 or 3


def require_equal(name, results):
    tolerance = MIXED if CASES[name].policy == "mixed_bfloat16" else TOLERANCE
    expected = plain(name)
    assert results.keys() == expected.keys()
    for what, value in results.items():
        np.testing.assert_allclose(
            value.astype(np.float64), expected[what].astype(np.float64), err_msg=what, **tolerance
        )


AMONG_WORKERS = [
    "dense",
    "a partial batch",
    "convolution",
    "dropout",
    "augmentation",
    "VAE, stateful, a partial batch",
    "GAN",
]


@pytest.mark.parametrize("name", AMONG_WORKERS if "workers" in STRATEGIES else ["dense"])
def test_every_strategy_equals_one_device(name, strategy):
    require_equal(name, life(CASES[name], strategy))


@pytest.fixture
def programs(monkeypatch):
    """Return, by the name of a step, its first program, as each device has it."""
    found = {}

    def show(module, static):
        dispatch, compiled = module.dispatch, {}

        def shown(topology, label, program, *args):
            if "_step`" not in label:
                return dispatch(topology, label, program, *args)
            arrays, rest = args[: len(args) - static], args[len(args) - static :]
            shapes = str([leaf.shape for leaf in jax.tree.leaves(arrays)])
            if (program, rest, shapes) not in compiled:
                compiled[program, rest, shapes] = program.lower(*args).compile()
            run = compiled[program, rest, shapes]
            found.setdefault(label.split("`")[1], run)
            return dispatch(topology, label, run, *arrays)

        monkeypatch.setattr(module, "dispatch", shown)

    show(_steps, 2)  # the last two arguments are part of the program
    show(_compiled_program, 0)
    return found


def has_arrays_of(shape, program):
    return re.search(rf"[a-z]\d+\[{shape}[,\]]", program.as_text()) is not None


QUICK = ("a partial batch", "convolution", "dropout", "class weights", "augmentation", "GAN")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in CASES
        if name != "dense"
    ],
)
def test_every_kind_of_program_equals_one_device_and_is_divided(name, programs):
    """Equal would also be programs in which every device computes everything."""
    case = CASES[name]
    # No batch divides by three; elsewhere two, of which each has exactly half.
    strategy = rx.MirroredStrategy(cpus(3 if "partial" in name else 2))
    require_equal(name, life(case, strategy))
    if case.whole is not None:
        assert not has_arrays_of(case.whole, programs["train_step"])
    if name == "without jit_compile":
        assert programs == {}


def test_what_is_not_divided_would_be_seen(programs):
    life(CASES["dropout"], rx.MirroredStrategy(cpus(1)))
    assert has_arrays_of(CASES["dropout"].whole, programs["train_step"])


def test_tpus():
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    rx.tpu.experimental.initialize_tpu_system(resolver)
    require_equal("dense", life(CASES["dense"], rx.TPUStrategy(resolver)))
