"""Objects created in the first run of a step: by the first replica, for all."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica

import replicax as rx


def own_number():
    return jnp.float32(rx.get_replica_context().replica_id_in_sync_group) + 1.0


def total(strategy):
    count = strategy.num_replicas_in_sync
    return count * (count + 1) / 2


def test_a_branch_that_makes_a_variable_is_entered_once(strategy, execution):
    made, entered = {}, []

    def replica_step():
        if "v" not in made:
            entered.append(True)
            begin = own_number if execution == "eager" else 1.0  # a program has no number yet
            made["v"] = rx.Variable(begin, aggregation="SUM")
        made["v"].assign_add(own_number())
        return made["v"].value

    for _ in range(2):
        strategy.run(replica_step)
    assert len(entered) == 1
    equal(made["v"].numpy(), 1.0 + 2 * total(strategy))
    with strategy.scope():
        assert strategy.extended.variable_created_in_scope(made["v"])


def test_variables_that_every_replica_makes_are_the_same(strategy):
    kept = []

    def replica_step():
        first = rx.Variable(0.0, aggregation="SUM")
        several = [rx.Variable(float(i), aggregation="SUM") for i in range(3)]
        for variable in (first, *several):
            variable.assign_add(own_number())
        kept[:] = [first, *several]
        return [variable.value for variable in kept]

    results = strategy.run(replica_step)
    assert len({id(variable) for variable in kept}) == 4
    for start, result in zip((0.0, 0.0, 1.0, 2.0), results, strict=True):
        components_equal(
            strategy, result, [start + total(strategy)] * strategy.num_replicas_in_sync
        )


def test_some_are_found_and_others_are_made_anew(strategy):
    made = {}

    def replica_step():
        if not made:
            made["kept"] = rx.Variable(10.0, aggregation="SUM")
        new = rx.Variable(20.0, aggregation="SUM")  # of the same name, shape and dtype
        new.assign_add(own_number())
        made["kept"].assign_add(own_number())
        return new.value

    for step in range(1, 3):
        result = strategy.run(replica_step)
        expected = [20.0 + total(strategy)] * strategy.num_replicas_in_sync
        components_equal(strategy, result, expected)
        equal(made["kept"].numpy(), 10.0 + step * total(strategy))


def test_a_program_cannot_make_a_variable_whenever_it_is_traced(strategy):
    step = rx.function(lambda: rx.Variable(0.0, aggregation="SUM").assign_add(1.0).value)
    with pytest.raises(rx.errors.InconsistentTracing, match="created under a condition"):
        strategy.run(step)


def test_an_optimizer_made_in_the_step_trains(strategy, execution):
    made = {}
    numbers = per_replica(
        strategy, [np.float32(replica + 1) for replica in range(strategy.num_replicas_in_sync)]
    )

    def replica_step(x):
        if not made:
            made["weight"] = rx.Variable(1.0)
            made["optimizer"] = rx.Optimizer(optax.adam(0.1))
        weight = made["weight"]
        return made["optimizer"].minimize(lambda: x * weight, [weight])

    for _ in range(3):
        strategy.run(replica_step, args=(numbers,))
    weight = rx.Variable(1.0)
    optimizer = rx.Optimizer(optax.adam(0.1))
    for _ in range(3):
        optimizer.minimize(lambda: total(strategy) * weight, [weight])
    equal(made["weight"].numpy(), weight.numpy())
    equal(made["optimizer"].iterations.numpy(), 3)


def test_a_replica_that_makes_one_alone_is_named(two):
    def replica_step():
        if rx.get_replica_context().replica_id_in_sync_group == 1:
            rx.Variable(0.0, name="lonely")

    with pytest.raises(rx.errors.CollectiveMismatch, match=r"replica 1 called .*'lonely'.*did not"):
        two.run(replica_step)


def test_an_error_in_making_one_reaches_every_replica(two):
    seen = []

    def replica_step():
        try:
            rx.Variable(1, aggregation="MEAN")
        except ValueError as error:
            seen.append(str(error))
        return rx.get_replica_context().all_reduce("SUM", own_number())

    components_equal(two, two.run(replica_step), [3.0, 3.0])
    assert len(seen) == 2
    assert len(set(seen)) == 1


def test_variables_that_differ_between_replicas_are_refused(two):
    made = {}

    def by_shape():
        own = rx.get_replica_context().replica_id_in_sync_group
        return rx.Variable(jnp.zeros(own + 1), name="v").shape

    def by_name():
        own = rx.get_replica_context().replica_id_in_sync_group
        for number in (0, own + 1):
            if number not in made:
                made[number] = rx.Variable(0.0, name=f"w{number}")

    with pytest.raises(rx.errors.CollectiveMismatch, match=r"shape=\(2,\)\), and replica 0 called"):
        two.run(by_shape)
    with pytest.raises(rx.errors.CollectiveMismatch, match=r"'w2'.* replica 0 called .*'w"):
        two.run(by_name)
