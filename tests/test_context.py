"""Scopes and contexts."""

import threading

import jax
import jax.numpy as jnp
import pytest

import replicax as rx


def test_outside_every_scope_is_the_replica_context_of_the_default_strategy():
    default = rx.get_strategy()
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()
    context = rx.get_replica_context()
    assert context.strategy is default
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)


def test_a_scope_is_cross_replica_context(two):
    with two.scope() as entered:
        assert entered is two
        assert rx.get_strategy() is two
        assert rx.has_strategy()
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None
    assert not rx.has_strategy()


def test_scopes_of_one_strategy_nest_and_a_scope_can_be_entered_again(two):
    scope = two.scope()
    with scope, scope, two.scope():
        assert rx.get_strategy() is two
    assert not rx.has_strategy()
    with scope:
        assert rx.get_strategy() is two


def test_scopes_of_different_strategies_do_not_nest(two):
    other = rx.OneDeviceStrategy("CPU:0")
    with two.scope():
        for enter in (other.scope().__enter__, lambda: other.run(int)):
            with pytest.raises(RuntimeError, match=r"MirroredStrategy\(2\).*do not nest"):
                enter()
        assert rx.get_strategy() is two


def test_the_default_strategy_is_not_entered_inside_another(two):
    default = rx.get_strategy()
    with two.scope(), pytest.raises(RuntimeError, match="do not nest"):
        default.run(int)
    with default.scope():
        assert rx.get_strategy() is default


def test_a_scope_is_left_when_its_body_raises(two):
    with pytest.raises(KeyError), two.scope():
        raise KeyError
    assert not rx.has_strategy()


def test_replica_context_inside_run(strategy):
    def fn():
        context = rx.get_replica_context()
        return (
            rx.get_strategy() is strategy,
            context.strategy is strategy,
            rx.in_cross_replica_context(),
            context.num_replicas_in_sync == strategy.num_replicas_in_sync,
            len(context.devices) == strategy.topology.logical_devices_per_replica,
        )

    assert strategy.run(fn) == (True, True, False, True, True)
    assert not rx.has_strategy()


CROSS_REPLICA_METHODS = {
    "run": lambda s: s.run(int),
    "reduce": lambda s: s.reduce("SUM", 1.0, axis=None),
    "gather": lambda s: s.gather([1.0], axis=0),
    "scope": lambda s: s.scope().__enter__(),
    "experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(lambda context: 1.0)
    ),
    "call_for_each_replica": lambda s: s.extended.call_for_each_replica(int),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", 1.0, "CPU:0"),
    "batch_reduce_to": lambda s: s.extended.batch_reduce_to("SUM", [(1.0, "CPU:0")]),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0, "CPU:0"),
    "update_non_slot": lambda s: s.extended.update_non_slot("CPU:0", int),
}


@pytest.mark.parametrize("method", CROSS_REPLICA_METHODS)
def test_cross_replica_methods_refuse_replica_context(method, two):
    with pytest.raises(RuntimeError, match=f"`{method}` needs cross-replica context.*replica"):
        two.run(lambda: CROSS_REPLICA_METHODS[method](two))


def test_a_replica_context_cannot_be_used_across_replicas(two):
    kept = []
    two.run(lambda: kept.append(rx.get_replica_context()))
    for context in kept:
        for call in (
            lambda context=context: context.all_reduce("SUM", 1.0),
            lambda context=context: context.all_gather([1.0], axis=0),
            lambda context=context: context.merge_call(lambda strategy: None),
        ):
            with pytest.raises(RuntimeError, match="outside of its replica context"):
                call()
            with two.scope(), pytest.raises(RuntimeError, match="cross-replica context of Mirr"):
                call()


def test_merge_call_is_cross_replica_context(strategy):
    def merge(given, number):
        assert given is strategy
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None
        return number

    assert strategy.run(lambda: rx.get_replica_context().merge_call(merge, args=(7,))) == 7


def test_update_context(two):
    with two.scope():
        variable = rx.Variable(1.0)

    def fn(copy):
        assert rx.get_strategy() is two
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None

    two.extended.update(variable, fn)


def test_a_new_thread_starts_outside_every_scope(two):
    seen = []
    with two.scope():
        thread = threading.Thread(target=lambda: seen.append(rx.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_two_threads_run_different_strategies_at_once():
    results = {}

    def work(count):
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(count)])
        for _ in range(20):
            total = strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", 1.0))
            results[count] = [float(x) for x in strategy.experimental_local_results(total)]

    threads = [threading.Thread(target=work, args=(count,)) for count in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {2: [2.0] * 2, 3: [3.0] * 3}


def test_set_strategy(two):
    try:
        rx.experimental_set_strategy(two)
        assert rx.get_strategy() is two
        assert rx.in_cross_replica_context()
        with two.scope(), pytest.raises(RuntimeError, match="inside a scope"):
            rx.experimental_set_strategy(None)
        with pytest.raises(RuntimeError, match="inside a scope"):
            two.run(lambda: rx.experimental_set_strategy(None))
        other = rx.OneDeviceStrategy("CPU:0")
        rx.experimental_set_strategy(other)
        assert rx.get_strategy() is other
    finally:
        rx.experimental_set_strategy(None)
    assert not rx.has_strategy()
    with pytest.raises(TypeError, match="takes a strategy"):
        rx.experimental_set_strategy("mirrored")


def test_the_scope_of_the_default_strategy_changes_nothing(two):
    with rx.get_strategy().scope():
        assert not rx.in_cross_replica_context()
        assert rx.get_replica_context() is not None
        with two.scope():
            assert rx.get_strategy() is two


def test_one_scope_object_in_two_threads(two):
    scope, seen = two.scope(), []

    def work():
        with scope:
            seen.append(rx.get_strategy() is two)

    with scope:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert rx.get_strategy() is two
    assert seen == [True]
    assert not rx.has_strategy()


def test_the_default_strategy_moves_nothing():
    device = jax.devices()[3]
    x = jax.device_put(jnp.arange(2.0), device)
    variable = rx.Variable(x)
    out = rx.get_strategy().run(lambda y: variable + y, args=(x,))
    assert out.devices() == {device}
