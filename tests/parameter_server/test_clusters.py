"""Clusters with parameter servers: tasks, hosts, tokens, and what is refused before Ray starts."""

from __future__ import annotations

import stat
import sys

import pytest

import replicax as rx
from replicax.parameter_server._roles import Hosts, Role
from replicax.parameter_server._token import require_token

SPEC = rx.ClusterSpec(
    {"chief": ["127.0.0.1:1111"], "worker": ["127.0.0.1:1"] * 2, "ps": ["localhost:1", "far:1"]}
)


def test_each_task_on_this_machine_has_a_host():
    hosts = Hosts(SPEC)
    assert hosts.head == "127.0.0.2:1111"
    assert hosts.of(Role("ps", 0)) == "127.0.0.3"
    assert hosts.of(Role("worker", 1)) == "127.0.0.6"
    many = rx.ClusterSpec(
        {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:1"] * 600}
    )
    every = {Hosts(many).of(Role("worker", index)) for index in range(600)}
    assert len(every) == 600
    assert not every & {"127.0.0.1", "127.0.0.2", "127.1.0.1"}


def test_other_machines_are_used_as_they_are(monkeypatch):
    cluster = {"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:1"], "ps": ["10.0.0.3:1"]}
    hosts = Hosts(rx.ClusterSpec(cluster))
    assert hosts.head == "10.0.0.1:2222"
    assert not hosts.head_is_here
    assert hosts.of(Role("worker", 0)) == "10.0.0.2"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"chief": ["a:1"], "worker": ["b:1"]}, "has no 'ps'"),
        ({"chief": ["a:1"], "ps": ["b:1"]}, "has no 'worker'"),
        ({"worker": ["a:1"], "ps": ["b:1"]}, "has one task in the job 'chief'"),
        ({"chief": ["a"], "worker": ["b:1"], "ps": ["c:1"]}, "needs a host and a port"),
    ],
)
def test_clusters_that_cannot_be(cluster, message):
    resolver = rx.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0)
    job = "worker" if "worker" in cluster else "ps"
    with pytest.raises(ValueError, match=message):
        rx.Server(cluster, job_name=job, task_index=0)
    if "has no" in message:
        with pytest.raises(ValueError, match=message):
            rx.ParameterServerStrategy(resolver)


def test_servers_that_cannot_be():
    assert rx.Server(SPEC, "ps", 0, "grpc").target == "127.0.0.2:1111"
    with pytest.raises(ValueError, match="job_name='chief'"):
        rx.Server(SPEC, "chief", 0)
    with pytest.raises(ValueError, match="no task 2 in the job 'worker'"):
        rx.Server(SPEC, "worker", 2)
    with pytest.raises(ValueError, match="`protocol` must be a string"):
        rx.Server(SPEC, "worker", 0, 3)


def test_only_the_chief_makes_a_strategy():
    resolver = rx.cluster_resolver.SimpleClusterResolver(SPEC, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=r"this process is worker 0. Its program is `rx\.Server"):
        rx.ParameterServerStrategy(resolver)
    with pytest.raises(TypeError, match=r"must be one of `rx\.cluster_resolver`"):
        rx.ParameterServerStrategy("worker")


def test_resolvers_that_cannot_be():
    resolver = rx.cluster_resolver.RayClusterResolver(2, 3, address="auto")
    assert resolver.cluster_spec().num_tasks("ps") == 3
    assert (resolver.task_type, resolver.task_id, resolver.address) == ("chief", 0, "auto")
    assert resolver.master("worker", 1) == "ray-worker-1"
    with pytest.raises(ValueError, match="`num_workers` must be a whole number, 1 or more; got 0"):
        rx.cluster_resolver.RayClusterResolver(0, 1)
    with pytest.raises(ValueError, match="`address` must be that of a Ray cluster"):
        rx.cluster_resolver.RayClusterResolver(1, 1, address=6379)


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def test_a_token_is_made_once_and_is_the_users_own(no_token):
    require_token(may_make=True)
    token = no_token.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(no_token.stat().st_mode) == 0o600
    require_token(may_make=True)
    require_token(may_make=False)
    assert no_token.read_text() == token
    assert [path.name for path in no_token.parent.iterdir()] == ["auth_token"]
    no_token.write_text("")
    require_token(may_make=True)
    assert len(no_token.read_text()) == 64


def test_without_a_token_a_server_says_what_to_do(no_token, monkeypatch):
    with pytest.raises(ValueError, match="Copy that file from the chief's machine"):
        require_token(may_make=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    require_token(may_make=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="got RAY_AUTH_MODE='disabled'"):
        require_token(may_make=True)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch, no_token):
    monkeypatch.setitem(sys.modules, "ray", None)
    resolver = rx.cluster_resolver.RayClusterResolver(1, 1)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'replicax\[ray\]'"):
        rx.ParameterServerStrategy(resolver)
    with pytest.raises(rx.errors.MissingLibrary):
        rx.Server(SPEC, "worker", 0).join()
