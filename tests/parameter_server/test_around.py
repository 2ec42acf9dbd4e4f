"""Checkpoints, tables, metrics and copies of variables on parameter servers."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

partitioners = rx.experimental.partitioners


def test_checkpoints_go_to_other_servers_and_strategies(make, tmp_path):
    def variables(strategy):
        with strategy.scope():
            table = rx.Variable(np.zeros((7, 2), np.float32), name="table")
            bias = rx.Variable(np.zeros(3, np.float32), name="bias")
            optimizer = rx.Optimizer(optax.adam(0.1))
        return table, bias, optimizer

    def step_of(table, bias, optimizer):
        @rx.function
        def step():
            optimizer.apply_gradients([(jnp.ones((7, 2)), table), (jnp.ones(3), bias)])

        return step

    ps = make(workers=1, servers=2, partitioner=partitioners.FixedShardsPartitioner(3))
    table, bias, optimizer = variables(ps.strategy)
    step = step_of(table, bias, optimizer)
    for _ in range(3):
        ps.coordinator.schedule(step)
    ps.coordinator.join()
    path = rx.Checkpoint(table=table, bias=bias, optimizer=optimizer).save(tmp_path / "ps")
    ps.coordinator.schedule(step).fetch()
    wanted = [table.numpy(), bias.numpy()]

    other = make(workers=1, servers=3)
    mine = variables(other.strategy)
    names = ("table", "bias", "optimizer")
    rx.Checkpoint(**dict(zip(names, mine, strict=True))).restore(path)
    other.coordinator.schedule(step_of(*mine)).fetch()
    for variable, value in zip(mine, wanted, strict=False):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)

    mirrored = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    mine = variables(mirrored)
    rx.Checkpoint(**dict(zip(names, mine, strict=True))).restore(path)
    with mirrored.scope():
        step_of(*mine)()
    for variable, value in zip(mine, wanted, strict=False):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)
    back = rx.Checkpoint(**dict(zip(names, mine, strict=True))).save(tmp_path / "mirrored")
    rx.Checkpoint(table=table, bias=bias, optimizer=optimizer).restore(back)
    np.testing.assert_allclose(table.numpy(), wanted[0], rtol=1e-6)
    assert optimizer.iterations.numpy() == 4


def test_the_table_of_variables(make):
    ps = make(partitioner=partitioners.FixedShardsPartitioner(2))
    ps.variable(np.zeros((4, 2), np.float32), name="table")  # which is gone
    kept = ps.variable(np.zeros((6, 2), np.float32), name="kept")
    table = ps.strategy.extended.describe_variables()
    assert [(row.name, row.bytes) for row in table.rows] == [("kept", 48)]
    assert kept.variables[0].name == "kept/part_0"


def test_a_metric(make):
    ps = make(workers=2)
    with ps.strategy.scope():
        mean = rx.metrics.Mean()

    @rx.function
    def step(x):
        ps.strategy.run(lambda x: mean.update_state(x), args=(x,))

    for number in range(10):
        ps.coordinator.schedule(step, args=(jnp.float32(number),))
    ps.coordinator.join()
    assert float(mean.result()) == 4.5


def test_a_deep_copy_has_its_own_value(make):
    ps = make()
    variable = ps.variable([1.0, 2.0])
    other = copy.deepcopy(variable)
    other.assign_add([1.0, 1.0])
    assert variable.numpy().tolist() == [1, 2]
    assert other.numpy().tolist() == [2, 3]


def test_what_cannot_be_on_a_server(make):
    import jax

    ps = make()
    with pytest.raises(TypeError, match=r"Keep random keys as `jax\.random\.key_data"):
        ps.variable(jax.random.key(0))
    keras = pytest.importorskip("keras", reason="Keras is not installed: replicax[keras]")
    with ps.strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    step = rx.function(lambda x: model(x))
    with pytest.raises(ValueError, match="another library, such as Keras or Flax"):
        ps.coordinator.schedule(step, args=(np.ones((2, 2), np.float32),))


def test_embedding_lookup():
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = rx.embedding_lookup(jnp.asarray(table), [[2], [0]])
    np.testing.assert_array_equal(found, table[[[2], [0]]])
    with pytest.raises(TypeError, match="takes a variable or an array"):
        rx.embedding_lookup("table", [1])
