"""The resolver of TPUs, on a machine without any."""

import inspect
import subprocess
import sys

import jax
import pytest

import replicax as rx
from replicax.cluster_resolver import TPUClusterResolver


@pytest.fixture
def tpus(monkeypatch):
    """Makes JAX find TPUs: the first two devices."""
    local_devices, found = jax.local_devices, jax.local_devices()[:2]
    monkeypatch.setattr(
        jax, "local_devices", lambda backend: found if backend == "tpu" else local_devices(backend)
    )
    return found


@pytest.fixture
def no_tpus(monkeypatch):
    local_devices = jax.local_devices

    def without(backend):
        if backend == "tpu":
            raise RuntimeError("Unknown backend tpu")
        return local_devices(backend=backend)

    monkeypatch.setattr(jax, "local_devices", without)


@pytest.mark.usefixtures("no_tpus")
def test_on_a_machine_without_tpus_cpus_stand_in_for_them():
    resolver = TPUClusterResolver(tpu="local")
    assert resolver.devices() == tuple(jax.devices())
    assert resolver.num_accelerators() == {"TPU": 8}


def test_tpus_are_found_by_jax(tpus):
    for tpu in ("", None, "local"):
        assert TPUClusterResolver(tpu).devices() == tuple(tpus)
    assert TPUClusterResolver().num_accelerators() == {"TPU": 2}


@pytest.mark.usefixtures("no_tpus")
def test_without_tpus_it_says_what_to_do():
    for ask in (TPUClusterResolver().devices, TPUClusterResolver.connect, rx.TPUStrategy):
        with pytest.raises(rx.errors.DeviceError, match=r'Unknown backend tpu.*tpu="local"'):
            ask()


def test_named_devices():
    resolver = TPUClusterResolver(["CPU:3", jax.devices()[1]])
    assert [device.id for device in resolver.devices()] == [3, 1]
    assert resolver.num_accelerators() == {"TPU": 2}
    assert TPUClusterResolver.connect(["CPU:3"]).devices() == (jax.devices()[3],)
    with pytest.raises(rx.errors.DeviceError, match="needs at least one device"):
        rx.TPUStrategy(TPUClusterResolver([]))
    with pytest.raises(rx.errors.DeviceError, match="There is no device CPU:99"):
        TPUClusterResolver(["CPU:99"]).devices()


@pytest.mark.parametrize("tpu", ["my-tpu", "grpc://10.0.0.2:8470", "CPU:0"])
def test_a_name_or_an_address_is_refused_with_the_reason(tpu):
    with pytest.raises(rx.errors.ClusterError, match="runs on the machine that has the TPU"):
        TPUClusterResolver(tpu)


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match="got 5"):
        TPUClusterResolver(5)


def test_it_answers_what_every_resolver_answers():
    resolver = TPUClusterResolver("local")
    assert resolver.cluster_spec() == rx.ClusterSpec({})
    assert resolver.master() == resolver.master("worker", 0, "grpc") == ""
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert (resolver.environment, resolver.rpc_layer) == ("", None)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "other", 3, "grpc"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("other", 3, "grpc")


def test_to_make_one_starts_no_jax_backend():
    code = """
        import jax, replicax as rx
        resolver = rx.cluster_resolver.TPUClusterResolver(["CPU:0", "CPU:2"])
        rx.cluster_resolver.TPUClusterResolver("local"), rx.cluster_resolver.TPUClusterResolver()
        jax.config.update("jax_platforms", "cpu")  # where there is one, it would be too late
        print(rx.TPUStrategy(resolver).extended.worker_devices[1].id)
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "2", done.stderr


def test_one_of_several_machines_of_a_slice_is_no_worker_by_itself(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1")
    with pytest.raises(rx.errors.ClusterError, match=r"one of 2 of a TPU slice .*'t-0,t-1'"):
        TPUClusterResolver().cluster_spec()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert not TPUClusterResolver().cluster_spec().jobs
