"""The same function again: what is known by its object, and what by its closure."""

from __future__ import annotations

import functools
import gc
import sys
import weakref

import numpy as np
import pytest
from support import per_replica

import replicax as rx
from replicax.execution import _function_cache
from replicax.execution._function_cache import FunctionCache, by_closure, by_object


class Compiled:
    def __init__(self, fn):
        self.fn = fn

    def call(self, x):
        return self.fn(x)


def scaled_by(factor):
    return lambda x: x * factor


def test_functions_that_close_over_the_same_are_the_same():
    cache = FunctionCache(Compiled, by_closure, "changed {} times")
    first = cache.compiled(scaled_by(2.0))
    assert cache.compiled(scaled_by(2.0)) is first
    assert cache.compiled(scaled_by(-0.0)) is not cache.compiled(scaled_by(0.0))
    assert cache.compiled(functools.partial(scaled_by(2.0), 1)) is not first
    held = np.ones(2)
    assert cache.compiled(scaled_by(held)) is cache.compiled(scaled_by(held))
    assert cache.compiled(scaled_by(held)) is not cache.compiled(scaled_by(held.copy()))


def test_functions_that_are_other_objects_are_others():
    cache = FunctionCache(Compiled, by_object, "changed {} times")
    fn = scaled_by(2.0)
    assert cache.compiled(fn) is cache.compiled(fn)
    assert cache.compiled(scaled_by(2.0)) is not cache.compiled(fn)
    one, other = Compiled(fn), Compiled(fn)
    assert cache.compiled(one.call) is cache.compiled(one.call), "a method is bound anew"
    assert cache.compiled(one.call) is not cache.compiled(other.call)


def test_those_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(_function_cache, "_MOST", 2)
    cache = FunctionCache(Compiled, by_object, "changed {} times")
    functions = [scaled_by(number) for number in range(3)]
    first, second = (cache.compiled(fn) for fn in functions[:2])
    assert cache.compiled(functions[0]) is first
    cache.compiled(functions[2])
    assert cache.compiled(functions[0]) is first
    assert cache.compiled(functions[1]) is not second
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None


def test_another_one_every_time_is_worth_a_hint():
    cache = FunctionCache(Compiled, by_closure, "changed {} times")
    with pytest.warns(rx.errors.PerformanceHint, match="scaled_by.*changed 16 times") as seen:
        assert len({cache.compiled(scaled_by(number)) for number in range(20)}) == 20
    assert len(seen) == 1


def calls_of_run():
    """Count the calls of `Strategy.run` on the stack."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code is rx.Strategy.run.__code__
        frame = frame.f_back
    return count


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)], ids=["even", "uneven"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_run_is_on_the_stack_once(two, compiled, sizes):
    seen = set()

    def step(x):
        seen.add(calls_of_run())
        return x.sum()

    x = per_replica(two, [np.ones(size, np.float32) for size in sizes])
    two.run(rx.function(step) if compiled else step, args=(x,))
    assert seen == {1}


def test_run_is_on_the_stack_once_where_a_function_runs_eagerly_after_all(two):
    seen = set()

    def step(x):
        seen.add(calls_of_run())
        return len(x)

    words = per_replica(two, ["one", "three"])
    two.run(rx.function(step), args=(words,))
    assert seen == {1}


def test_a_function_captured_twice_is_the_same_each_round():
    cache = FunctionCache(Compiled, by_closure, "changed {} times")

    def made():
        def loss(x):
            return x

        def metric(x):
            return loss(x) * 2

        return lambda x: loss(x) + metric(x)

    def recursive():
        def count(x):
            return count(x - 1) if x else 0

        return count

    assert cache.compiled(made()) is cache.compiled(made())
    assert cache.compiled(recursive()) is cache.compiled(recursive())
