"""Clusters that cannot come together say why, each in its own words, within seconds."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Sequence

import pytest
from workers import Ended, run

import replicax as rx
from replicax import _jax_compat
from replicax.launch import free_ports

PROGRAM = "tests/multiprocess/starting.py"


def told(index: int, addresses: Sequence[str], **others: object) -> dict[str, str]:
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps({**config, **others})}


def on_loopback(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def start(cluster: Sequence[dict[str, str]], *arguments: str, timeout: float = 4.0) -> list[Ended]:
    return run([PROGRAM, str(timeout), *arguments], 60, cluster=cluster)


def failure(ended: Ended) -> str:
    assert ended.code == 1, ended.output
    (message,) = re.findall(r"^replicax\.errors\.\w+: (.*)$", ended.output, re.MULTILINE)
    return message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "TF_CONFIG"),
        (
            json.dumps(
                {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}
            ),
            "This process is 'worker 2', which the cluster does not have: there are worker 0",
        ),
        (
            json.dumps(
                {"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}
            ),
            "worker 0 and worker 1 have the same address, a:1",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}),
            "not said which of them this process is",
        ),
        (
            json.dumps(
                {"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}
            ),
            "The address of a worker is host:port; got 'b'",
        ),
        (
            json.dumps(
                {
                    "cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
                    "task": {"type": "ps", "index": 0},
                }
            ),
            "A task of type 'ps' takes no part",
        ),
        (
            json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 5}}),
            "This process is 'worker 5', which the cluster does not have: there are worker 0",
        ),
        (
            json.dumps(
                {
                    "cluster": {"worker": ["a..b:1", "b:1"]},
                    "task": {"type": "worker", "index": 0},
                }
            ),
            "The address of a worker is host:port; got 'a..b:1'",
        ),
        (
            json.dumps(
                {
                    "cluster": {"worker": ["a:1", f"b:{'9' * 5000}"]},
                    "task": {"type": "worker", "index": 0},
                }
            ),
            "The address of a worker is host:port; got 'b:999",
        ),
    ],
    ids=[
        "malformed",
        "index",
        "duplicate",
        "no task",
        "no port",
        "parameter server",
        "index of one worker",
        "impossible name",
        "port of 5,000 digits",
    ],
)
def test_what_is_wrong_in_tf_config_is_said_at_once(monkeypatch, config, expected):
    monkeypatch.setenv("TF_CONFIG", config)
    with pytest.raises(rx.errors.ClusterError, match=re.escape(expected)):
        rx.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"chief": ["a:1"]}},
        {
            "cluster": {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]},
            "task": {"type": "evaluator", "index": 0},
        },
    ],
    ids=["empty", "one worker", "one chief", "evaluator"],
)
def test_a_worker_on_its_own_needs_nobody(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = rx.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 8
    assert isinstance(strategy.cluster_resolver, rx.cluster_resolver.TFConfigClusterResolver)
    assert rx.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync == 8


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="cluster_resolver"):
        rx.MultiWorkerMirroredStrategy("worker")
    with pytest.raises(TypeError, match="communication_options"):
        rx.MultiWorkerMirroredStrategy(communication_options=5)


@pytest.mark.parametrize("level", ["", "verbose", "99999999999"])
def test_any_level_of_logging(monkeypatch, level):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with _jax_compat.only_errors_logged():
        pass


def test_workers_come_together_without_a_limit():
    addresses = on_loopback(2)
    for ended in start([told(index, addresses) for index in range(2)], timeout=math.inf):
        assert ended.code == 0, ended.output


def test_a_chief_and_a_worker_come_together(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")  # which they do not ask
    monkeypatch.setenv("no_proxy", "example.org")
    chief, worker = on_loopback(2)
    cluster = {"chief": [chief], "worker": [worker], "evaluator": ["nowhere:1"]}
    tasks = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
    both = [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]
    for ended in start(both, timeout=60):
        assert ended.code == 0, ended.output
        assert "together: 2 replicas" in ended.output


def test_a_chief_that_cannot_be_reached():
    addresses = on_loopback(2)
    (ended,) = start([told(1, addresses)], timeout=5.5)
    expected = rf"worker 1 could not reach worker 0 \({addresses[0]}\) for \d+ s: .*refused"
    assert re.match(expected, failure(ended))
    assert "replicax: worker 1 waits for worker 0" in ended.output  # said before it gives up


def test_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = [f"127.0.0.1:{taken.getsockname()[1]}", *on_loopback(1)]
        (ended,) = start([told(0, addresses)])
    assert "cannot listen there" in failure(ended)
    assert "in use" in failure(ended)


def test_an_address_of_another_machine():
    (ended,) = start([told(0, ["192.0.2.1:2222", "192.0.2.2:2222"])])
    assert "192.0.2.1, which is not an address of this machine" in failure(ended)
    assert "Its task index belongs to another one" in failure(ended)


def test_a_loopback_address_among_others():
    addresses = [*on_loopback(1), "192.0.2.1:2222"]
    for each in start([told(0, addresses), told(1, addresses)], timeout=200):
        assert "is 127.0.0.1 on this machine, where no other machine can reach it" in failure(each)


def test_an_address_at_which_another_worker_cannot_listen():
    addresses = [*on_loopback(1), "nowhere.invalid:2222"]
    first, second = start([told(0, addresses), told(1, addresses)], timeout=20)
    expected = "worker 1 (nowhere.invalid:2222) cannot listen there for the collectives of CPUs"
    assert failure(second).startswith(expected)
    assert expected in failure(first)
    assert first.seconds < second.seconds + 8  # the cause is gone, and known to be


def test_a_worker_that_is_missing_is_named_by_all():
    addresses = on_loopback(3)
    first, second = start([told(0, addresses), told(1, addresses)], timeout=7)
    for each in (first, second):  # of whom one gives up first, and the other says so
        assert f"still waits for worker 2 ({addresses[2]})" in failure(each)
    assert "replicax: worker 0 waits for worker 2" in first.output


def test_a_start_that_comes_to_nothing_ends(tmp_path):
    arguments = ["tests/multiprocess/joining.py", "start_backend", "4", str(tmp_path / "never")]
    for each in run(arguments, 60):
        assert re.search(r"waited 1\d s in starting JAX's backend\. No worker is to", failure(each))


def test_two_processes_of_one_index_and_other_clusters_are_turned_away():
    addresses = on_loopback(2)
    ended = start(
        [
            told(0, addresses),
            told(1, addresses),
            told(1, [addresses[0], "127.0.0.1:1"]),
        ],
        timeout=20,
    )
    assert [each.code for each in ended] == [0, 0, 1], [each.output for each in ended]
    assert "Give all workers the same cluster" in failure(ended[2])


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (lambda a: [a[0], "127.0.0.1:1", a[2]], r"was refused: it has the cluster \["),
        (lambda a: [a[0], a[2], a[1]], r"was refused: it has the workers in the order \["),
    ],
    ids=["another cluster", "another order"],
)
def test_those_who_wait_hear_of_one_that_was_turned_away(others, reason):
    addresses = on_loopback(3)
    ended = start([told(0, addresses), told(1, addresses), told(2, others(addresses))], timeout=200)
    for each in ended[:2]:  # long before the time-out
        assert re.search(rf"came as worker 2 \({addresses[2]}\) {reason}", failure(each))
        assert "Start as many processes" not in failure(each)
    assert "was turned away" in failure(ended[2])
    assert "replicax: worker 0 waits for others. A process that came as" in ended[0].output


def test_jax_was_used_before():
    (ended,) = start([told(0, on_loopback(2))], "used")
    message = failure(ended)
    assert "JAX was used before the workers came together" in message
    assert "use_jax_first" in ended.output.split(message)[-1]
    assert "jnp.ones(3)" in ended.output.split(message)[-1]
