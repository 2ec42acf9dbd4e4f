"""Parameter servers and workers as processes of Ray: what only these can show."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install replicax[ray]")

import ray_clusters

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads processes from /proc")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Fail a test after which a process or a folder of Ray is there that was not before."""
    processes, folders = ray_clusters.processes_of_ray(), ray_clusters.folders_of_ray()
    yield
    deadline = time.monotonic() + 30
    while ray_clusters.processes_of_ray() - processes and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray_clusters.processes_of_ray() <= processes
    assert ray_clusters.folders_of_ray() <= folders


BEGIN = """
    import json, os, random, signal, sys
    import jax.numpy as jnp, numpy as np
    import replicax as rx

    def make(resolver):
        strategy = rx.ParameterServerStrategy(resolver)
        return strategy, rx.coordinator.ClusterCoordinator(strategy)
"""


def test_a_cluster_on_this_machine():
    """Ray is started and stopped with the program; one worker trains as NumPy does."""
    program = """
    strategy, coordinator = make(rx.cluster_resolver.RayClusterResolver(num_workers=1, num_ps=2))
    with strategy.scope():
        weight, count = rx.Variable(np.float32([1, 2])), rx.Variable(0)

    @rx.function
    def step(iterator):
        x = next(iterator)
        weight.assign_sub(0.5 * x * weight)
        count.assign_add(1)
        return weight.value

    batches = [np.float32([i, 2 * i]) for i in range(4)]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: batches))
    steps = [coordinator.schedule(step, args=(iterator,)) for _ in range(4)]
    last = steps[-1].fetch().tolist()
    wanted = np.float32([1, 2])
    for x in batches:
        wanted = wanted - np.float32(0.5) * x * wanted
    coordinator.schedule(step, args=(iterator,))
    try:
        coordinator.join()
    except StopIteration as error:
        ended = error.__notes__
    print(json.dumps({"last": last, "weight": weight.numpy().tolist(),
                      "wanted": wanted.tolist(), "count": int(count.numpy()), "ended": ended}))
    """
    got = ray_clusters.run_chief(BEGIN + program)
    assert got["last"] == got["weight"] == got["wanted"]
    assert got["count"] == 4
    assert "was run by worker 0" in got["ended"][-1]


def test_the_page_about_parameter_servers():
    page = Path(__file__).parents[2] / "docs" / "parameter_servers.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    got = ray_clusters.run_chief(
        f"{program}\nimport json\n"
        "print(json.dumps({'loss': float(losses[-1].fetch()), 'w': weight.numpy().tolist()}))"
    )
    assert got["loss"] < 1e-3


@pytest.mark.slow
def test_workers_that_are_killed_at_random():
    """A hundred kills during two thousand functions end with the sum that is expected."""
    program = """
    import threading
    strategy, coordinator = make(rx.cluster_resolver.RayClusterResolver(num_workers=3, num_ps=2))
    with strategy.scope():
        totals = [rx.Variable(np.int32(0)) for _ in range(4)]

    @rx.function
    def add(x):
        for total in totals:
            total.assign_add(x)
        return x

    dice, pause, kills, values = random.Random(0), threading.Event(), 0, []

    def kill_a_worker():
        while True:
            up = [thread for thread in coordinator._threads if thread.is_up]
            try:
                os.kill(dice.choice(up)._actor.process().result(20), signal.SIGKILL)
                return
            except Exception:  # all are being started again, or this one has just ended
                pause.wait(0.05)

    for number in range(2000):
        values.append(coordinator.schedule(add, args=(np.int32(number),)))
        if number % 20 == 19:
            kill_a_worker()
            kills += 1
    coordinator.join()
    print(json.dumps({"totals": [int(total.numpy()) for total in totals], "kills": kills,
                      "values": sum(int(value.fetch()) for value in values)}))
    """
    got = ray_clusters.run_chief(BEGIN + program)
    assert got["kills"] == 100
    assert got["totals"] == [sum(range(2000))] * 4
    assert got["values"] == sum(range(2000))


@pytest.mark.slow
def test_a_stopped_worker_is_given_up():
    """Its process is there, and does nothing: another one runs what it had."""
    program = """
    strategy, coordinator = make(rx.cluster_resolver.RayClusterResolver(num_workers=2, num_ps=1))
    with strategy.scope():
        total = rx.Variable(0)
    step = rx.function(lambda: total.assign_add(1).value)
    coordinator.schedule(step).fetch()
    for _ in range(100):
        coordinator.schedule(step)
    os.kill(coordinator._threads[0]._actor.process().result(20), signal.SIGSTOP)
    for _ in range(100):
        coordinator.schedule(step)
    coordinator.join()
    print(json.dumps({"total": int(total.numpy())}))
    """
    got = ray_clusters.run_chief(BEGIN + program)
    assert got["total"] == 201
    assert "worker 0 is lost: its process has not answered for 20 s" in got["stderr"]


def test_a_killed_server_is_named_within_seconds():
    program = """
    import time
    strategy, coordinator = make(rx.cluster_resolver.RayClusterResolver(num_workers=1, num_ps=2))
    with strategy.scope():
        first, second = rx.Variable(1.0), rx.Variable(2.0)
    step = rx.function(lambda: (first.value, second.assign_add(1.0).value))
    coordinator.schedule(step).fetch()
    server = strategy._engine.servers._actors[1]
    os.kill(server.process().result(20), signal.SIGKILL)
    began, errors = time.monotonic(), []
    for change in (lambda: coordinator.schedule(step).fetch(), coordinator.join,
                   lambda: second.numpy()):
        try:
            change()
        except rx.errors.ServerLost as error:
            errors.append(str(error))
    print(json.dumps({"errors": errors, "first": float(first.numpy()),
                      "seconds": time.monotonic() - began}))
    """
    got = ray_clusters.run_chief(BEGIN + program)
    assert len(got["errors"]) == 3
    assert all("Parameter server 1 (ray-ps-1) is lost" in error for error in got["errors"])
    assert got["first"] == 1


@pytest.mark.slow
def test_servers_of_their_own_and_a_chief_that_is_killed():
    """A worker is killed and started again; a second chief uses the same servers."""
    program = """
    strategy, coordinator = make(rx.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        total = rx.Variable(0.0)

    @rx.function
    def add():
        total.assign_add(1.0)
        return rx.coordinator.experimental_get_current_worker_index()

    seen = {int(coordinator.schedule(add).fetch()) for _ in range(10)}
    print(json.dumps({"total": float(total.numpy()), "seen": sorted(seen)}), flush=True)
    if "die" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with ray_clusters.Servers(workers=2, ps=1) as servers:
        config = servers.config("chief", 0)
        got = ray_clusters.run_chief(BEGIN + program, TF_CONFIG=config)
        assert got["total"] == 10
        with pytest.raises(AssertionError, match=r'"total": 10\.0'):
            ray_clusters.run_chief(BEGIN + program, TF_CONFIG=config, die="yes")
        servers.processes["worker", 1].kill()
        servers.processes["worker", 1].wait()
        servers.start("worker", 1)
        got = ray_clusters.run_chief(BEGIN + program, TF_CONFIG=config)
        assert got["total"] == 10
