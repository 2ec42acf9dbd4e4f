"""`replicax doctor`: once as people run it, and then its parts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import click.testing
import pytest

import replicax as rx
from replicax._command_line import main
from replicax._environments import ENVIRONMENTS
from replicax.cluster._members import Address, Members
from replicax.doctor import _devices, _numbers, _numbers_worker, _self_test
from replicax.doctor._check import Check, Verdict, ok
from replicax.doctor._cluster import find_cluster
from replicax.doctor._devices import ask_jax
from replicax.doctor._numbers import self_checks
from replicax.doctor._ports import check_ports
from replicax.doctor._self_test import Exit, judged, run_together, self_test
from replicax.launch import free_ports


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Whatever this machine may be a part of."""
    for environment in ENVIRONMENTS:
        for name in environment._signs.variables:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def held_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


@pytest.fixture
def doctor(monkeypatch):
    """Runs the command in this process, without the self-test; gives exit code and output."""
    monkeypatch.setattr(_devices, "ask_jax", lambda environment: [ok("local devices", "made up")])

    def run(**environment: str) -> tuple[int, str]:
        runner = click.testing.CliRunner(env=environment)
        done = runner.invoke(main, ["doctor", "--no-self-test"], catch_exceptions=False)
        return done.exit_code, done.output

    return run


def config(*addresses: str, index: int = 0) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replicax", "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def cluster(*addresses: str, index: int = 0) -> Members:
    names = tuple(f"worker {worker}" for worker in range(len(addresses)))
    return Members(names, tuple(map(Address.parse, addresses)), index)


def verdicts(checks: list[Check]) -> list[str]:
    return [check.verdict.value for check in checks]


# As people run it.


def test_a_machine_that_is_fit():
    done = run_doctor(JAX_NUM_CPU_DEVICES="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for line in (
        r"ok +Python +3\.",
        r"ok +jaxlib +\d",
        r"ok +local devices +3 cpu",
        r"note +JAX_NUM_CPU_DEVICES +3",
        r"ok +resolver +none: runs as one worker",
        r"ok +free ports +127\.0\.0\.1",
        r"ok +float32 products +gives 1073741824\.0",
        r"ok +float64 products +gives 268435456\.0",
        r"ok +empty in a sum +gives \[0\.0, 2\.0, 4\.0\]",
        r"ok +rank-7 reduction +gives 2\.0",
        r"ok +rank-8 reduction +gives 6\.0",
        r"ok +strategy\.reduce +gives \[3\.0\]",
        r"ok +strategy\.gather +gives \[1\.0, 2\.0\]",
        r"ok +compiled step +gives \[0\.25\]",
        r"ok +coming together +[\d.]+ s",
        r"ok +small all-reduce +[\d.]+ ms",
        r"ok +eager reduce +[\d.]+ ms",
        r"ok +large all-reduce +\d+ MB/s",
        r"No problems\.",
    ):
        assert re.search(f"^ *{line}", done.stdout, re.MULTILINE), f"{line}\n{done.stdout}"
    assert "\x1b" not in done.stdout


def test_a_port_that_is_in_use_is_a_problem(held_port):
    told = config(f"127.0.0.1:{held_port}", f"127.0.0.1:{free_ports(1)[0]}")
    done = run_doctor("--no-self-test", TF_CONFIG=told)
    assert done.returncode == 1
    assert "TFConfigClusterResolver, because TF_CONFIG is set" in done.stdout
    assert "2 workers, of which this is worker 0" in done.stdout
    assert re.search(r"problem +worker 0 .*cannot listen there: Address already", done.stdout)
    assert "end the process that has it" in done.stdout
    assert re.search(r"ok +worker 1 .*no process listens yet", done.stdout)
    assert "Self-test" not in done.stdout
    assert done.stdout.endswith("1 problem.\n")


# What it says of clusters.


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ('{"cluster": ', "It is not JSON"),
        (config("127.0.0.1:4000", "127.0.0.1:4001", index=7), "'worker 7', which the cluster does"),
        (config("127.0.0.1:4000", "127.0.0.1:4000"), "worker 0 and worker 1 have the same address"),
    ],
)
def test_a_cluster_that_cannot_be_is_a_problem(doctor, told, message):
    code, output = doctor(TF_CONFIG=told)
    assert code == 1
    assert re.search(rf"problem +cluster .*{message}", output)
    assert "1 problem." in output


def test_a_good_cluster_is_none(doctor):
    ports = free_ports(2)
    code, output = doctor(TF_CONFIG=config(*(f"127.0.0.1:{port}" for port in ports), index=1))
    assert code == 0, output
    assert re.search(rf"ok +worker 1 +127\.0\.0\.1:{ports[1]}: this one; the port is free", output)
    assert "No problems." in output


def test_slurm_is_found_and_left_as_it_is(monkeypatch):
    for name, value in {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NODELIST": "node[08-09]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    found = find_cluster()
    assert dict(os.environ) == before
    assert found.members is not None
    assert [str(each) for each in found.members.addresses] == ["node08:8888", "node09:8888"]
    assert found.members.name == "worker 1"
    assert "SlurmClusterResolver, because SLURM_PROCID and" in found.checks[0].found
    assert verdicts(list(found.checks)) == ["ok"] * 4


@pytest.mark.parametrize(
    ("told", "missing"),
    [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("JOB_COMPLETION_INDEX", "REPLICAX_NUM_WORKERS")],
)
def test_half_an_environment_is_a_note(monkeypatch, told, missing):
    monkeypatch.setenv(told, "0")
    found = find_cluster()
    assert found.members is None
    assert verdicts(list(found.checks)) == ["ok", "note"]
    assert f"{told} is set, but not {missing}" in found.checks[1].found


def test_strategies_use_the_resolver_that_the_doctor_names(monkeypatch):
    """Each environment is tried together with all later ones of the list."""
    every = {
        "TF_CONFIG": "{}",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "node08",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "JOB_COMPLETION_INDEX": "0",
        "HOSTNAME": "train-0",
        "REPLICAX_NUM_WORKERS": "1",
        "REPLICAX_SUBDOMAIN": "pods",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    for name, value in every.items():
        monkeypatch.setenv(name, value)
    names = []
    for environment in ENVIRONMENTS:
        used = rx.MultiWorkerMirroredStrategy().cluster_resolver
        assert type(used) is environment
        assert f"{environment.__name__}, because" in find_cluster().checks[0].found
        names.append(environment.__name__.removesuffix("ClusterResolver"))
        monkeypatch.delenv(environment._signs.variables[0])
    assert names == ["TFConfig", "Slurm", "Kubernetes", "TPU"]
    used = rx.MultiWorkerMirroredStrategy().cluster_resolver
    assert isinstance(used, rx.cluster_resolver.TFConfigClusterResolver)
    assert "runs as one worker" in find_cluster().checks[0].found


def test_kubernetes_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setenv("HOSTNAME", "train-0")
    monkeypatch.setenv("REPLICAX_NUM_WORKERS", "2")
    monkeypatch.delenv("REPLICAX_SUBDOMAIN", raising=False)
    found = find_cluster()
    assert found.checks[-1].verdict is Verdict.PROBLEM
    assert "REPLICAX_SUBDOMAIN" in found.checks[-1].found


def test_what_strategies_use_by_themselves_goes_first(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("TF_CONFIG", config("127.0.0.1:4000"))
    found = find_cluster()
    assert found.members is None
    assert "TFConfigClusterResolver" in found.checks[0].found
    assert any("SlurmClusterResolver, though" in check.found for check in found.checks)
    assert "runs as one worker" in found.checks[-1].found


# What it says of addresses.


def test_only_the_first_worker_needs_its_port(held_port):
    checks = check_ports(cluster("127.0.0.1:1", f"127.0.0.1:{held_port}", index=1))
    assert verdicts(checks) == ["ok", "note"]


def test_somebody_who_listens_is_seen(held_port):
    own = f"127.0.0.1:{free_ports(1)[0]}"
    checks = check_ports(cluster(f"127.0.0.1:{held_port}", own, index=1))
    assert "a process listens" in checks[0].found


def test_names_that_mean_nothing(monkeypatch):
    known = socket.getaddrinfo

    def getaddrinfo(name, *rest, **options):  # name servers may take their time to say no
        if name == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    members = cluster(f"127.0.0.1:{free_ports(1)[0]}", "nowhere:2222")
    checks = check_ports(members)
    assert verdicts(checks) == ["ok", "problem"]
    assert "'nowhere' does not resolve" in checks[1].found
    assert verdicts(check_ports(members, names_come_later=True)) == ["ok", "note"]


def test_the_address_of_another_machine_is_not_this_one():
    checks = check_ports(cluster("192.0.2.1:2222", f"127.0.0.1:{free_ports(1)[0]}"))
    assert checks[0].verdict is Verdict.PROBLEM
    assert "no address of this machine" in checks[0].found


def test_a_loopback_address_among_machines_is_a_problem(monkeypatch):
    def create_connection(address, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    checks = check_ports(cluster(f"127.0.0.1:{free_ports(1)[0]}", "192.0.2.1:2222"))
    assert verdicts(checks) == ["ok", "note", "problem"]
    assert "no answer: timed out" in checks[1].found
    assert "no other machine can reach" in checks[2].found


# What it says of JAX, and of workers that fail.


def test_jax_without_devices_is_a_problem():
    (check,) = ask_jax({**os.environ, "JAX_PLATFORMS": "abacus"})
    assert check.verdict is Verdict.PROBLEM
    assert "abacus" in check.found


def test_the_last_words_of_workers_are_shown(monkeypatch):
    program = (
        "import sys; print('before', flush=True); sys.exit('no luck\\n    @  0x7f9b  absl::log()')"
    )
    monkeypatch.setattr(_self_test, "_COMMAND", (sys.executable, "-S", "-c", program))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    checks = self_test()
    assert verdicts(checks) == ["problem", "problem"]
    assert checks[0].found == "ended with exit code 1. It said last:\nbefore\nno luck"
    assert "unset http_proxy" in checks[0].advice


def test_workers_that_go_on_and_on_are_ended():
    program = "import time; print('here', flush=True); time.sleep(600)"
    ended = run_together([sys.executable, "-S", "-c", program], [dict(os.environ)] * 2, 1.0)
    assert [each.code for each in ended] == [None, None]
    assert ended[0].how.startswith("did not end within")
    assert Exit(-6, "").how == "was ended by SIGABRT"


def test_wrong_numbers_are_a_problem():
    right = {"name": "strategy.reduce", "got": [3.0], "expected": [3.0]}
    checks = judged([right, {**right, "got": [2.0]}])
    assert verdicts(checks) == ["ok", "problem"]
    assert "gives [2.0] instead of [3.0]" in checks[1].found


# What it says of numbers.

WORKER = """
import json, os, signal, sys, time
for name in sys.argv[1:]:
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        time.sleep(60)
    if name == "raises":
        sys.exit("no such thing")
    answer = {"name": name, "got": 2.0, "expected": 3.0 if name == "wrong" else 2.0}
    print("replicax-numbers " + json.dumps(answer), flush=True)
"""


def test_programs_that_crash_hang_or_give_wrong_numbers(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    names = ["right", "crashes", "wrong", "hangs", "raises", "right again"]
    monkeypatch.setattr(_numbers_worker, "__file__", str(worker))
    monkeypatch.setattr(_numbers_worker, "CHECKS", dict.fromkeys(names))
    monkeypatch.setattr(_numbers, "_PATIENCE_SECONDS", 2.0)
    checks = self_checks(os.environ)
    assert [check.name for check in checks] == names
    assert verdicts(checks) == ["ok", "problem", "problem", "problem", "problem", "ok"]
    assert [check.found for check in checks] == [
        "gives 2.0, as it should",
        "crashed the process (SIGSEGV)",
        "gives 2.0 instead of 3.0",
        "did not end within 2 s",
        "failed: no such thing",
        "gives 2.0, as it should",
    ]
    assert all("pip install" in check.advice for check in checks[1:5])
