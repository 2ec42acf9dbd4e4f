"""The values of a replica's code that differ between the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import replicax as rx
from replicax.execution._varying import Level, levels, varying_outputs

AXIS = "replica"
SPLIT, SAME = PartitionSpec(AXIS), PartitionSpec()


def written(value: Any, *, to: Any) -> Any:
    ref = jax.new_ref(to)
    before = ref[...]
    ref[...] = value
    return before, jax.freeze(ref)


def read_before_written_in_a_loop(x: Any, w: Any) -> Any:
    ref = jax.new_ref(w)

    def body(carry: Any, _: None) -> Any:
        before = ref[...]
        ref[...] = x
        return carry, before

    return lax.scan(body, 0, None, length=2)[1]


def written_under_condition(x: Any, w: Any, condition: Any) -> Any:
    ref = jax.new_ref(w)

    def write() -> Any:
        ref[...] = w * 2
        return 0

    lax.cond(condition, write, lambda: 0)
    return ref[...]


def accumulated(x: Any, w: Any) -> Any:
    ref = jax.new_ref(w)
    jax.ref.addupdate(ref, ..., x)
    return ref[...]


def reduced(x: Any) -> Any:
    return lax.pmean(x, AXIS)


# What a replica computes of `x`, of which each has its own, and `w`, which is the same; and whether
# that may differ.
PROGRAMS = {
    "own": (lambda x, w: x, True),
    "same": (lambda x, w: w, False),
    "constant": (lambda x, w: jnp.ones(2), False),
    "of both": (lambda x, w: x * w, True),
    "number of the replica": (lambda x, w: w + lax.axis_index(AXIS), True),
    "psum": (lambda x, w: lax.psum(x, AXIS), False),
    "pmax": (lambda x, w: lax.pmax(x, AXIS) * w, False),
    "all_gather": (lambda x, w: lax.all_gather(x, AXIS), False),
    "psum_scatter": (lambda x, w: lax.psum_scatter(w, AXIS, tiled=True), True),
    "ppermute": (lambda x, w: lax.ppermute(w, AXIS, [(0, 1)]), True),
    "psum in groups": (lambda x, w: lax.psum(x, AXIS, axis_index_groups=[[0], [1]]), True),
    "reduced and own": (lambda x, w: reduced(x) + x, True),
    "reduced and scaled": (lambda x, w: jnp.clip(reduced(x) * 0.5, -1, 1), False),
    "jit": (lambda x, w: jax.jit(reduced)(x), False),
    "jit of own": (lambda x, w: jax.jit(jnp.sin)(x), True),
    "checkpoint": (lambda x, w: jax.checkpoint(lambda a: reduced(jnp.sin(a)))(x), False),
    "gradient": (lambda x, w: reduced(jax.grad(lambda w: (jax.nn.relu(w) * x).sum())(w)), False),
    "own gradient": (lambda x, w: jax.grad(lambda w: (jax.nn.relu(w) * x).sum())(w), True),
    "scan of same": (lambda x, w: lax.scan(lambda c, _: (c * 2, c), w, None, length=3)[0], False),
    "scan over own": (lambda x, w: lax.scan(lambda c, e: (c + e, c), 0.0, x)[0], True),
    "scan carrying own round": (
        lambda x, w: lax.scan(lambda c, _: ((c[1], c[2], c[2]), c), (w, w, x), None, length=3)[0][
            0
        ],
        True,
    ),
    "scan that reduces": (
        lambda x, w: lax.scan(lambda c, _: (c + reduced(x), c), w, None, length=3)[0],
        False,
    ),
    "while of same": (lambda x, w: lax.fori_loop(0, 3, lambda _, c: c * 2, w), False),
    "while with own count": (
        lambda x, w: lax.fori_loop(0, x[0].astype(int), lambda _, c: c * 2, w),
        True,
    ),
    "cond by same": (lambda x, w: lax.cond(w[0] > 0, lambda: w, lambda: w * 2), False),
    "cond by own": (lambda x, w: lax.cond(x[0] > 0, lambda: w, lambda: w * 2), True),
    "cond with own in a branch": (lambda x, w: lax.cond(w[0] > 0, lambda: w, lambda: x), True),
    "switch": (lambda x, w: lax.switch(1, [lambda: x, lambda: w, lambda: w]), True),
    "ref of same": (lambda x, w: written(w * 2, to=w)[1], False),
    "ref of own": (lambda x, w: written(w, to=x)[0], True),
    "ref written with own": (lambda x, w: written(x, to=w)[1], True),
    "ref written with reduced": (lambda x, w: written(reduced(x), to=w)[1], False),
    "ref added to": (accumulated, True),
    "ref in a loop": (read_before_written_in_a_loop, True),
    "ref under own condition": (lambda x, w: written_under_condition(x, w, x[0] > 0), True),
    "ref under same condition": (lambda x, w: written_under_condition(x, w, w[0] > 0), False),
    "callback": (
        lambda x, w: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(w.shape, w.dtype), w),
        True,
    ),
    "custom solver": (
        lambda x, w: lax.custom_linear_solve(lambda y: y * 2, w, lambda _, b: b / 2),
        False,
    ),
    "custom solver of own": (
        lambda x, w: lax.custom_linear_solve(lambda y: y * 2, x, lambda _, b: b / 2),
        True,
    ),
    "random of same": (lambda x, w: jax.random.uniform(jax.random.key(0), (2,)) * w, False),
    "random of own": (
        lambda x, w: jax.random.uniform(jax.random.fold_in(jax.random.key(0), x[0].astype(int))),
        True,
    ),
    "sorted": (lambda x, w: jnp.sort(reduced(x)), False),
    "vmapped": (lambda x, w: jax.vmap(lambda a: lax.psum(a, AXIS))(x), False),
}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return rx.MirroredStrategy(["CPU:0", "CPU:1"]).topology.mesh


def body_of(function: Any, mesh: jax.sharding.Mesh) -> Any:
    mapped = jax.shard_map(
        lambda x, w: jnp.atleast_1d(function(x, w)),
        mesh=mesh,
        in_specs=(SPLIT, SAME),
        out_specs=SPLIT,
        check_vma=False,
    )
    program = jax.make_jaxpr(mapped)(jnp.float32([1, 2, 3, 5]), jnp.float32([1, 3]))
    (equation,) = program.eqns
    assert equation.primitive.name == "shard_map"
    return equation.params["jaxpr"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_varies_is_read_off_the_program(name: str, mesh: jax.sharding.Mesh):
    function, varies = PROGRAMS[name]

    assert varying_outputs(body_of(function, mesh), [True, False], AXIS) == [varies]


def test_what_does_not_vary_is_equal(mesh: jax.sharding.Mesh):
    equal = [function for function, varies in PROGRAMS.values() if not varies]

    def all_of_them(x: Any, w: Any) -> list[Any]:
        return [jnp.atleast_1d(function(x, w))[None] for function in equal]

    mapped = jax.shard_map(
        all_of_them, mesh=mesh, in_specs=(SPLIT, SAME), out_specs=SPLIT, check_vma=False
    )
    for both in jax.jit(mapped)(jnp.float32([1, 2, 3, 5]), jnp.float32([1, 3])):
        np.testing.assert_array_equal(*both)


def test_an_axis_of_another_name_reduces_nothing(mesh: jax.sharding.Mesh):
    assert varying_outputs(body_of(PROGRAMS["psum"][0], mesh), [True, False], "other") == [True]


@pytest.mark.parametrize(
    ("function", "level"),
    [
        (lambda x, w: w, Level.SAME),
        (lambda x, w: lax.psum(w, AXIS), Level.SAME),
        (lambda x, w: reduced(x) * w, Level.REDUCED),
        (lambda x, w: written(reduced(x), to=w)[1], Level.SAME),
        (lambda x, w: reduced(x) * x, Level.VARYING),
    ],
)
def test_what_was_reduced_is_told_from_what_never_varied(function, level, mesh):
    assert levels(body_of(function, mesh), [True, False], AXIS) == [level]
