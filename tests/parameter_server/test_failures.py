"""Workers and servers that are lost: what is run again, and that it is applied once."""

from __future__ import annotations

import gc
import random

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.coordinator._closures import ClosureQueue
from replicax.coordinator._programs import Scheduled
from replicax.coordinator._worker_thread import Presence
from replicax.parameter_server import ActorLost, VariableServer, WriteTo


def test_a_closure_of_a_lost_worker_is_applied_once(make):
    """Workers are lost before, in, and after every part of their work."""
    dice = random.Random(7)
    kills = []

    def prepare(index, actor):
        def maybe_end(method):
            if method == "run" and len(kills) < 100 and dice.random() < 0.3:
                kills.append(index)
                actor.end()

        actor.before = actor.after = maybe_end

    ps = make(workers=3, servers=2, prepare=prepare)
    totals = [ps.variable(0.0), ps.variable(0.0)]

    @rx.function
    def add(x):
        for total in totals:
            total.assign_add(x)
        return x

    values = [ps.coordinator.schedule(add, args=(jnp.float32(i),)) for i in range(300)]
    assert ps.coordinator.fetch(values) == list(range(300))
    assert [float(total.numpy()) for total in totals] == [sum(range(300))] * 2
    assert len(kills) > 20
    assert ps.engine.starts >= len(kills)


def test_a_worker_that_is_lost_between_two_servers(make):
    """One server has applied the writes of the closure, the other has not got them."""
    ps = make(workers=1, servers=2)
    first, second = ps.variable(0.0), ps.variable(0.0)
    ended = []

    def lose(method):
        if method == "apply" and not ended:
            ended.append(ps.engine.workers[0])
            ended[0].end()
            raise ActorLost("cut off")

    ps.engine.server_actors[1].before = lose

    @rx.function
    def add():
        first.assign_add(1.0)
        second.assign_add(1.0)

    ps.coordinator.schedule(add).fetch()
    assert ps.engine.starts == 2
    assert (float(first.numpy()), float(second.numpy())) == (1.0, 1.0)


def test_a_server_applies_a_closure_once():
    server = VariableServer()
    server.create(0, np.zeros(2))
    write = [WriteTo(0, "assign_add", np.ones(2))]
    assert server.apply(5, 3, write)
    assert not server.apply(5, 3, write)
    assert not server.apply(2, 3, write), "all before 3 are done: this worker was given up"
    assert server.apply(6, 6, write)
    assert not server.apply(5, 3, write)
    assert server.read([0])[0].tolist() == [2, 2]
    assert server.status() == {"arrays": 1, "bytes": 16, "closures": 1}


def test_a_server_applies_all_writes_or_none():
    server = VariableServer()
    server.create(0, np.zeros(2))
    server.create(1, np.zeros(3))
    writes = [WriteTo(0, "assign_add", np.ones(2)), WriteTo(1, "assign", np.ones(2))]
    with pytest.raises(ValueError, match="array 1 is float64"):
        server.apply(0, 0, writes)
    assert server.read([0])[0].tolist() == [0, 0]
    assert server.apply(0, 0, writes[:1])


def test_servers_keep_a_bounded_number_of_closures(make):
    ps = make(workers=2, servers=1)
    total = ps.variable(0)
    add = rx.function(lambda: (total.assign_add(1), 0)[1])
    for _ in range(500):
        ps.coordinator.schedule(add)
    ps.coordinator.join()
    assert total.numpy() == 500
    assert ps.engine.variable_servers[0].status()["closures"] <= 4


def test_a_lost_server_is_named(make):
    ps = make(workers=2, servers=2)
    variables = [ps.variable(0.0), ps.variable(0.0)]
    ps.engine.server_actors[1].end()
    with pytest.raises(rx.errors.ServerLost, match=r"Parameter server 1 \(place 1\) is lost"):
        variables[1].numpy()
    value = ps.coordinator.schedule(rx.function(lambda: variables[1].value))
    with pytest.raises(RuntimeError, match="Parameter server 1"):
        ps.coordinator.join()
    with pytest.raises(rx.errors.ServerLost):
        value.fetch()
    assert variables[0].numpy() == 0


def test_a_variable_that_is_gone_is_removed_from_its_server(make):
    ps = make(servers=1)
    kept, dropped = ps.variable(1.0), ps.variable(np.zeros((100, 100)))
    assert ps.engine.variable_servers[0].status()["arrays"] == 2
    del dropped
    kept.assign(2.0)
    assert ps.engine.variable_servers[0].status()["arrays"] == 1


def test_workers_that_cannot_be_used(make, capfd):
    def prepare(index, actor):
        raise ImportError("no module named x")

    ps = make(workers=2, prepare=prepare)
    with pytest.raises(rx.errors.StartFailed, match=r"Worker 0: ImportError: no module named x"):
        ps.coordinator.schedule(rx.function(lambda: jnp.float32(1)))
    assert "worker 1 cannot be used" in capfd.readouterr().err


def test_closures_do_not_wait_for_ever_for_workers(make):
    ps = make(workers=1)
    ps.engine.prepare = lambda index, actor: actor.end()  # each new one is lost at once
    ps.coordinator.schedule(rx.function(lambda: jnp.float32(1))).fetch()
    ps.engine.workers[0].end()
    value = ps.coordinator.schedule(rx.function(lambda: jnp.float32(1)))
    queue = ps.coordinator._queue
    presence = Presence(queue, 1, seconds=0.0)

    def wait():
        while not ps.coordinator.done():
            presence.look()

    with pytest.raises(rx.errors.WorkerLost, match="No worker has been there for 0 s"):
        wait()
    with pytest.raises(rx.errors.ClosureCancelled):
        value.fetch()


def test_closures_that_are_put_back_come_in_their_order():
    queue = ClosureQueue()
    for _ in range(5):
        queue.put(Scheduled("step", None, [], []))
    taken = [queue.take() for _ in range(4)]
    for index in (2, 0, 3):
        queue.put_back(taken[index])
    assert queue.settled == 0
    assert [queue.take().number for _ in range(4)] == [0, 2, 3, 4]
    queue.finish(taken[0], lambda: None)
    assert queue.settled == 1


def test_workers_forget_iterators_that_are_gone(make):
    ps = make(workers=1)
    made = []
    ps.engine.prepare = lambda index, actor: None
    step = rx.function(lambda iterator: next(iterator))
    for epoch in range(4):
        iterator = iter(ps.coordinator.create_per_worker_dataset(lambda: [np.int32(1)] * 3))
        made.append([ps.coordinator.schedule(step, args=(iterator,)) for _ in range(3)])
        del iterator
        assert ps.coordinator.fetch(made[epoch]) == [1, 1, 1]
    gc.collect()
    ps.coordinator.schedule(rx.function(lambda: jnp.float32(1))).fetch()
    assert len(ps.engine.workers[0]._target._iterators) == 0


def test_an_idle_worker_that_is_lost_is_started_again(make):
    """`schedule` finds it, when it asks for the first elements of a dataset."""
    ps = make(workers=1)
    ps.coordinator.schedule(rx.function(lambda: jnp.float32(1))).fetch()
    ps.engine.workers[0].end()
    iterator = iter(ps.coordinator.create_per_worker_dataset([np.float32(3)]))
    step = rx.function(lambda iterator: next(iterator))
    assert ps.coordinator.schedule(step, args=(iterator,)).fetch() == 3
    assert ps.engine.starts == 2


def test_closures_fail_if_no_worker_can_be_used_any_more(make, capfd):
    ps = make(workers=1)
    ps.coordinator.schedule(rx.function(lambda: jnp.float32(1))).fetch()

    def fail(index, actor):
        raise ImportError("no module named x")

    ps.engine.prepare = fail
    ps.engine.workers[0].end()
    ps.coordinator.schedule(rx.function(lambda: jnp.float32(1)))
    with pytest.raises(ImportError, match="no module named x"):
        ps.coordinator.join()
    assert "worker 0 cannot be used" in capfd.readouterr().err
