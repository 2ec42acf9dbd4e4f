"""Eager replicas: turns, meetings, failures."""

import contextlib
import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica

import replicax as rx
from replicax.execution import _eager


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


def test_fn_is_called_once_a_replica_in_order(strategy):
    calls = []
    strategy.run(lambda: calls.append(replica_id()))
    assert calls == list(strategy.topology.local_replicas)


def test_each_replica_computes_on_its_own_device(strategy):
    def fn(x):
        return x * 2, jnp.ones(3), jax.random.normal(jax.random.key(0), (2,))

    count = strategy.num_replicas_in_sync
    for nest in strategy.experimental_local_results(
        strategy.run(fn, args=(per_replica(strategy, list(np.arange(count, dtype=np.float32))),))
    ):
        given, *made = nest
        assert len(given.devices()) == strategy.topology.logical_devices_per_replica
        assert all(array.devices() <= given.devices() for array in made)
    result = strategy.run(lambda: jnp.ones(3))
    devices = [x.devices() for x in strategy.experimental_local_results(result)]
    assert devices == [{device} for device in strategy.extended.worker_devices]


def test_turns_are_deterministic(two):
    def fn(log):
        context = rx.get_replica_context()
        log.append((replica_id(), "start"))
        context.all_reduce("SUM", 1.0)
        log.append((replica_id(), "middle"))
        context.merge_call(lambda strategy: log.append("merge"))
        log.append((replica_id(), "end"))

    logs = []
    for _ in range(5):
        log = []
        two.run(lambda log=log: fn(log))
        logs.append(log)
    assert all(log == logs[0] for log in logs)
    assert logs[0] == [
        (0, "start"),
        (1, "start"),
        (0, "middle"),
        (1, "middle"),
        "merge",
        (0, "end"),
        (1, "end"),
    ]


def test_only_one_replica_runs_at_a_time():
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    running = []

    def fn():
        for _ in range(3):
            running.append(replica_id())
            time.sleep(0.002)
            assert running == [replica_id()]
            running.remove(replica_id())
            rx.get_replica_context().all_reduce("SUM", 1.0)

    strategy.run(fn)


def test_replica_0_and_merge_functions_run_on_the_callers_thread(two):
    threads = []

    def fn():
        threads.append(threading.current_thread())
        rx.get_replica_context().merge_call(lambda s: threads.append(threading.current_thread()))

    two.run(fn)
    caller = threading.current_thread()
    assert threads[0] is caller
    assert threads[1] is not caller
    assert threads[2] is caller


def test_a_function_without_meetings_needs_no_thread(two):
    threads = set()
    two.run(lambda: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_jax_settings_of_the_caller_hold_in_every_replica(two):
    def fn():
        rx.get_replica_context().all_reduce("SUM", 1.0)
        return jnp.asarray(1.0, dtype=jnp.float64).dtype

    with jax.enable_x64(True):
        assert two.run(fn) == jnp.float64


def test_context_variables_of_the_caller_hold_in_every_replica(two):
    import contextvars

    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def fn():
        rx.get_replica_context().all_reduce("SUM", 1.0)
        return variable.get()

    assert two.run(fn) == 5


def test_merge_call_happens_once_and_its_result_reaches_every_replica(strategy):
    count, calls = strategy.num_replicas_in_sync, []

    def merge(strategy, x, factor):
        calls.append(x)
        return strategy.reduce("SUM", x, axis=None) * factor, x

    def fn():
        x = jnp.float32(replica_id() + 1)
        total, own = rx.get_replica_context().merge_call(merge, (x,), {"factor": 2.0})
        return total, own

    total, own = strategy.run(fn)
    assert len(calls) == 1
    components_equal(strategy, total, [count * (count + 1)] * count)
    components_equal(strategy, own, np.arange(count) + 1)


def test_run_inside_merge_call(two):
    def merge(strategy, x):
        doubled = strategy.run(lambda x: x * 2, args=(x,))
        return strategy.reduce("SUM", doubled, axis=None)

    out = two.run(lambda: rx.get_replica_context().merge_call(merge, (replica_id() + 1.0,)))
    components_equal(two, out, [6.0, 6.0])


# Failures.


class Broken(Exception):
    pass


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_replicas_error_surfaces_as_itself_with_the_replica_named(culprit, when):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(3)])
    with strategy.scope():
        mean = rx.Variable(1.0, aggregation="MEAN")
        local = rx.Variable(1.0, synchronization="ON_READ", aggregation="SUM")

    def fail(now):
        if now == when and replica_id() == culprit:
            raise Broken(now)

    def fn():
        fail("before")
        local.assign_add(1.0)
        rx.get_replica_context().all_reduce("SUM", 1.0)
        fail("between")
        mean.assign(2.0)
        fail("after")

    with pytest.raises(Broken, match=when) as caught:
        strategy.run(fn)
    assert caught.value.__notes__ == [f"Raised in replica {culprit} of MirroredStrategy(3)."]
    # Everything is as before the run, and the strategy still works.
    components_equal(strategy, mean, [1.0] * 3)
    components_equal(strategy, local, [1.0] * 3)
    assert strategy.run(lambda: None) is None


def test_closing_over_an_array_of_another_device_says_what_to_do(two):
    rows = per_replica(two, [1.0, 1.0])
    total = jax.device_put(2.0, two.extended.worker_devices[0])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        two.run(lambda x: x / total, args=(rows,))
    assert any("Pass it in `args` of `run`" in note for note in caught.value.__notes__)
    assert [float(x) for x in two.run(lambda x, t: x / t, args=(rows, total)).values] == [0.5, 0.5]


def test_waiting_replicas_are_unwound_through_their_finally_blocks(two):
    cleaned = []

    def fn():
        try:
            if replica_id() == 1:
                raise Broken
            rx.get_replica_context().all_reduce("SUM", 1.0)
        except Exception:
            if replica_id() == 0:
                cleaned.append("swallowed")
            raise
        finally:
            cleaned.append(replica_id())

    with pytest.raises(Broken):
        two.run(fn)
    assert cleaned == [1, 0]


def test_an_error_in_a_merge_function_reaches_every_replica(two):
    def merge(strategy):
        raise Broken("merge")

    handled = []

    def fn():
        with contextlib.suppress(Broken):
            rx.get_replica_context().merge_call(merge)
        handled.append(replica_id())
        return rx.get_replica_context().all_reduce("SUM", 1.0)

    components_equal(two, two.run(fn), [2.0, 2.0])
    assert handled == [0, 1]
    with pytest.raises(Broken, match="merge"):
        two.run(lambda: rx.get_replica_context().merge_call(merge))


@pytest.mark.parametrize("odd_one", [0, 1, 2])
def test_replicas_that_disagree_are_told_at_once(odd_one):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(3)])

    def returns():
        if replica_id() != odd_one:
            rx.get_replica_context().all_reduce("SUM", 1.0)

    def gathers():
        context = rx.get_replica_context()
        if replica_id() == odd_one:
            return context.all_gather([1.0], axis=0)
        return context.all_reduce("SUM", [1.0])

    with pytest.raises(rx.errors.CollectiveMismatch) as caught:
        strategy.run(returns)
    assert f"replica {odd_one} returned" in str(caught.value)
    assert "called all_reduce(SUM)" in str(caught.value)
    with pytest.raises(RuntimeError) as caught:
        strategy.run(gathers)
    assert f"replica {odd_one} called all_gather(axis=0)" in str(caught.value)
    assert "called all_reduce(SUM)" in str(caught.value)


def test_a_mismatch_after_a_good_meeting(two):
    def fn():
        context = rx.get_replica_context()
        context.all_reduce("SUM", 1.0)
        if replica_id() == 1:
            context.all_reduce("MEAN", 1.0)

    with pytest.raises(RuntimeError, match=r"replica 0 returned; replica 1 called all_reduce\(ME"):
        two.run(fn)


def test_replicas_that_write_different_variables_of_one_name_are_told(two):
    with two.scope():
        one, other = rx.Variable(0.0, aggregation="SUM"), rx.Variable(0.0, aggregation="SUM")
    with pytest.raises(rx.errors.CollectiveMismatch, match="on the same variables"):
        two.run(lambda: (one if replica_id() == 0 else other).assign(1.0))
    equal(one, 0.0)


def test_a_result_of_merge_call_that_belongs_to_another_strategy_is_refused(two):
    def merge(strategy):
        return rx.PerReplica((1, 2, 3))

    with pytest.raises(rx.errors.ForeignValue, match="3 component"):
        two.run(lambda: rx.get_replica_context().merge_call(merge))


def test_errors_of_a_meeting_name_the_meeting(two):
    def fn():
        return rx.get_replica_context().all_reduce("SUM", jnp.ones(replica_id() + 1))

    with pytest.raises(ValueError, match="equal shapes") as caught:
        two.run(fn)
    assert caught.value.__notes__ == [
        "Raised where the replicas of MirroredStrategy(2) met for all_reduce(SUM)."
    ]


def test_a_failed_run_of_the_default_strategy_writes_nothing():
    variable = rx.Variable(1.0)

    def fn():
        variable.assign(2.0)
        raise Broken

    with pytest.raises(Broken):
        rx.get_strategy().run(fn)
    equal(variable, 1.0)


def test_a_keyboard_interrupt_ends_the_run(two):
    def fn():
        rx.get_replica_context().all_reduce("SUM", 1.0)
        if replica_id() == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.run(fn)


def test_meeting_inside_jit_is_refused_with_the_reason(two):
    def fn(x):
        return jax.jit(lambda x: rx.get_replica_context().all_reduce("SUM", x))(x)

    with pytest.raises(rx.errors.MeetingInTrace, match="inside a JAX transformation"):
        two.run(fn, args=(1.0,))


def test_many_collectives_in_a_row_do_not_stop(two):
    """XLA:CPU hangs when programs with collectives pile up; they must not."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    value = per_replica(strategy, [np.ones(8, np.float32)] * 4)
    for _ in range(1000):
        total = strategy.reduce("SUM", value, axis=None)
    equal(total, np.full(8, 4.0))


def test_a_failed_part_that_is_handled_changes_nothing(two):
    with two.scope():
        variable = rx.Variable(0.0)
        kept = rx.Variable(0.0)

    def merge(strategy):
        def half(copy):
            if copy.device == two.extended.worker_devices[1]:
                raise Broken
            copy.assign(5.0)

        def fails(strategy=strategy):
            variable.assign(7.0)
            raise Broken

        kept.assign(1.0)
        for part in (lambda: strategy.extended.update(variable, half), fails):
            with contextlib.suppress(Broken):
                if part is fails:
                    strategy.run(
                        lambda: rx.get_replica_context().merge_call(lambda s: fails()),
                    )
                else:
                    part()

    two.run(lambda: rx.get_replica_context().merge_call(merge))
    components_equal(two, variable, [0.0, 0.0])
    components_equal(two, kept, [1.0, 1.0])


@pytest.mark.parametrize("where", ["in replica 0", "in replica 1", "where they meet"])
def test_a_run_that_fails_keeps_nothing_of_the_caller(two, where):
    class Large:
        """Stands for a batch."""

    def fail(*_):
        raise ArithmeticError("of the step")

    def step():
        context = rx.get_replica_context()
        if where == "where they meet":
            context.merge_call(fail)
        context.merge_call(lambda strategy: None)
        if where == f"in replica {replica_id()}":
            fail()

    def call() -> weakref.ref[Large]:
        large = Large()
        try:
            two.run(step)
        except ArithmeticError:
            return weakref.ref(large)
        raise AssertionError("it has to fail")

    call()
    gc.collect()
    gc.disable()  # what a failed step leaves must not wait for the garbage collector
    try:
        assert [call()() for _ in range(5)] == [None] * 5
    finally:
        gc.enable()


def test_what_replica_0_sets_is_its_own(two):
    def fn():
        before = jnp.asarray(np.float64(1)).dtype
        with jax.enable_x64(True):
            rx.get_replica_context().all_reduce("SUM", 1.0)
        return before, jnp.asarray(np.float64(1)).dtype

    assert two.run(fn) == (jnp.float32, jnp.float32)


def test_meeting_in_a_finally_block_after_a_failure_does_not_stall(two):
    def fn():
        context = rx.get_replica_context()
        try:
            context.all_reduce("SUM", 1.0)
            if replica_id() == 0:
                raise Broken("first")
            context.all_reduce("SUM", 1.0)
        finally:
            context.all_reduce("SUM", 2.0)

    started = time.monotonic()
    with pytest.raises(Broken, match="first"):
        two.run(fn)
    assert time.monotonic() - started < 20  # and not the 30 s that a stuck replica is given


def test_a_replica_that_never_comes_is_reported(two, monkeypatch):
    monkeypatch.setattr(_eager, "_LONG", 0.2)
    lock = threading.Lock()

    def fn():
        if lock.acquire(timeout=0.5 if replica_id() else -1):
            rx.get_replica_context().all_reduce("SUM", 1.0)
            lock.release()
            return
        rx.get_replica_context().all_reduce("SUM", 1.0)

    with pytest.warns(RuntimeWarning, match=r"waited .* for replica 1, which is at:(.|\n)*acquire"):
        two.run(fn)
