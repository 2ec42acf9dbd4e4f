"""Sums over the replicas that travel together."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._jax_compat import jaxprs_within, shard_map_of, with_constants
from replicax.collectives import PackRules, packed
from replicax.execution._joined_sums import JoinedSums

AXIS = "replica"
SPLIT, SAME = PartitionSpec(AXIS), PartitionSpec()
X, W = np.arange(8, dtype=np.float32), np.float32([1, 2, 3])


def total(value: Any) -> Any:
    return lax.psum(value, AXIS)


def loss_and_gradients(x: Any, w: Any) -> Any:
    loss = (x * w.sum()).sum()
    return loss[None], total(x.sum() * w)


def loss_after_the_sum(x: Any, w: Any) -> Any:
    gradients = total(x.sum() * w)
    return (x * 3).sum()[None] / 2, gradients


def loss_that_needs_the_sum(x: Any, w: Any) -> Any:
    gradients = total(x.sum() * w)
    return (gradients.sum() * x.sum())[None], gradients


def two_sums(x: Any, w: Any) -> Any:
    return x, total(x.sum()) + total(x.sum() * w)


def chain(x: Any, w: Any) -> Any:
    first = total(x.sum())
    return x, total(x.sum() * first) + total(x.max()) + w


def other_kind(x: Any, w: Any) -> Any:
    return x.sum()[None], total(x.sum().astype(np.int32)) + w


def of_what_is_the_same(x: Any, w: Any) -> Any:
    return x, total(w) + total(x.sum())


def from_a_ref(x: Any, w: Any) -> Any:
    ref = jax.new_ref(w)
    ref[...] = total(x.sum() * w)
    return (ref[...].sum() * x.sum())[None], ref[...]


def before_another_sum(x: Any, w: Any) -> Any:
    ref = jax.new_ref(w)
    ref[...] = total(x.sum() * w)
    return (ref[...].sum() * x.sum())[None], total(ref[...] * x.sum())


def loss_and_a_pack(x: Any, w: Any) -> Any:
    sums = total(packed([x.sum() * w, x[:1]]))
    return (x * w.sum()).sum()[None], sums[:3] * sums[3]


def loss_and_a_long_pack(x: Any, w: Any) -> Any:
    sums = total(packed([x.sum() * w, *(x[:1] * number for number in range(9))]))
    return (x * w.sum()).sum()[None], sums[:3] * sums[11]


def loss_and_a_part_of_a_pack(x: Any, w: Any) -> Any:
    sums = total(packed([x.sum() * w, x[:1]])[:3])
    return (x * w.sum()).sum()[None], sums


def mapped(body: Any, *more: Any) -> Any:
    """Return `body` for two replicas, with `more` results than two."""
    mesh = rx.MirroredStrategy(["CPU:0", "CPU:1"]).extended.topology.mesh
    return jax.shard_map(
        body, mesh=mesh, in_specs=(SPLIT, SAME), out_specs=(SPLIT, SAME, *more), check_vma=False
    )


def joined_sums(function: Any, rules: PackRules) -> JoinedSums:
    body = shard_map_of(jax.make_jaxpr(mapped(function))(X, W)).body
    closed = body if isinstance(body, ClosedJaxpr) else with_constants(body, ())
    return JoinedSums(closed, [True, False], 1, rules)


def count_in(program: Any, name: str) -> int:
    return sum(
        (equation.primitive.name == name)
        + sum(count_in(inner, name) for inner in jaxprs_within(equation.params))
        for equation in program.eqns
    )


def sums_in(program: Any) -> int:
    return count_in(program, "psum")


@pytest.mark.parametrize(
    ("function", "before", "after", "results"),
    [
        (loss_and_gradients, 1, 1, [0]),
        (loss_after_the_sum, 1, 1, [0]),
        (loss_that_needs_the_sum, 1, 1, []),
        (two_sums, 2, 1, []),
        (chain, 3, 2, []),
        (other_kind, 1, 1, []),
        (of_what_is_the_same, 2, 2, []),
        (from_a_ref, 1, 1, []),
        (before_another_sum, 2, 2, [0]),
        (loss_and_a_pack, 1, 1, [0]),
        (loss_and_a_long_pack, 1, 1, [0]),
        (loss_and_a_part_of_a_pack, 1, 1, [0]),
    ],
)
def test_sums_that_do_not_need_each_other_join(function, before, after, results):
    program = jax.make_jaxpr(mapped(function))(X, W)
    joined = joined_sums(function, PackRules(1024, 1024, True))
    assert joined.results == results
    assert joined.any == (after < before or bool(results))
    changed = mapped(lambda *arguments: tuple(joined(*arguments)), *(SAME for _ in results))
    assert (sums_in(program), sums_in(jax.make_jaxpr(changed)(X, W))) == (before, after)
    expected = jax.jit(mapped(function))(X, W)
    outputs = jax.jit(changed)(X, W)
    jax.tree.map(np.testing.assert_array_equal, tuple(outputs[:2]), tuple(expected))
    for number, summed in zip(results, outputs[2:], strict=True):
        np.testing.assert_array_equal(summed, np.asarray(expected[number]).sum(keepdims=True))


def test_large_sums_travel_alone():
    assert not joined_sums(two_sums, PackRules(8, 8, True)).any


@pytest.mark.parametrize(
    ("function", "operation", "count"),
    [(loss_and_a_pack, "dynamic_update_slice", 3), (loss_and_a_long_pack, "concatenate", 1)],
)
def test_what_joins_a_pack_is_packed_with_it(function, operation, count):
    """Packing the pack again took three times as long as the step itself."""
    joined = joined_sums(function, PackRules(1024, 1024, True))
    program = jax.jit(mapped(lambda *arguments: tuple(joined(*arguments)), SAME))
    # JAX leaves out the first packing, whose result nothing needs any more.
    assert program.lower(X, W).as_text().count(f"{operation} %") == count
