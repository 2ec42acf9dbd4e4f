"""Device names and topologies."""

import jax
import pytest

import replicax as rx
from replicax.topology import resolve_device, resolve_devices


@pytest.mark.parametrize(
    "name",
    [
        "CPU:3",
        "cpu:3",
        "/cpu:3",
        "/CPU:3",
        "/device:CPU:3",
        "/device:cpu:3",
        "device:CPU:3",
        "/job:worker/replica:0/task:0/device:CPU:3",
        "/JOB:localhost/REPLICA:0/TASK:0/DEVICE:cpu:3",
        "/task:0/device:CPU:3",
        " CPU:3 ",
    ],
)
def test_every_form_of_a_name_means_the_same_device(name):
    assert resolve_device(name) is jax.devices("cpu")[3]


def test_a_device_object_is_itself_and_a_bare_platform_is_its_first_device():
    assert resolve_device(jax.devices()[2]) is jax.devices()[2]
    assert resolve_device("CPU") is jax.devices()[0]


@pytest.mark.parametrize("name", ["CPU:8", "GPU:0", "/task:1/device:CPU:0", "abacus:1"])
def test_an_unknown_device_is_refused_with_a_list_of_those_there_are(name):
    with pytest.raises(ValueError, match=r"CPU:0, CPU:1, .*CPU:7"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["", "CPU:", "CPU:-1", "CPU:one", "3", "/job:worker"])
def test_what_is_no_name_is_refused_with_examples(name):
    with pytest.raises(rx.errors.DeviceError, match="Names look like"):
        resolve_device(name)


@pytest.mark.parametrize("device", [3, None, ("CPU", 0)])
def test_what_is_neither_name_nor_device_is_refused(device):
    with pytest.raises(ValueError, match=r"a name or a `jax\.Device`"):
        rx.MirroredStrategy([device])


def test_logical_cpus_can_be_asked_for_again_but_not_changed():
    assert len(jax.devices()) == 8, "JAX is running"
    rx.config.set_logical_cpu_devices(8)
    with pytest.raises(ValueError, match="already running with 8"):
        rx.config.set_logical_cpu_devices(4)
    with pytest.raises(ValueError, match="1 or more"):
        rx.config.set_logical_cpu_devices(0)


def test_a_topology_is_a_value():
    one, other = rx.Topology.of(["CPU:0", "CPU:1"]), rx.Topology.of(["/cpu:0", "/device:CPU:1"])
    assert one == other
    assert hash(one) == hash(other)
    assert one != rx.Topology.of(["CPU:1", "CPU:0"])
    with pytest.raises(AttributeError):
        one.devices = ()


def test_a_topology_lays_replicas_and_logical_devices_out_as_a_mesh():
    topology = rx.Topology.of(resolve_devices(jax.devices()), logical_devices_per_replica=4)
    assert topology.num_replicas == 2
    assert topology.logical_devices_per_replica == 4
    assert topology.local_replicas == (0, 1)
    assert [device.id for device in topology.local_devices] == [0, 4]
    assert topology.mesh.shape == {"replica": 2, "logical_0": 2, "logical_1": 2}
    assert str(topology) == "2 x 4 CPU"


@pytest.mark.parametrize(("count", "axes"), [(1, ()), (3, (3,)), (6, (2, 3)), (8, (2, 2, 2))])
def test_logical_axes_are_prime(count, axes):
    topology = rx.Topology.of(jax.devices()[:count], logical_devices_per_replica=count)
    assert topology.mesh.devices.shape == (1, *axes)


@pytest.mark.parametrize(
    ("devices", "size", "message"),
    [
        ([], 1, "at least one device"),
        (["CPU:0", "/cpu:0"], 1, "more than once: cpu:0"),
        (["CPU:0", "CPU:1", "CPU:2"], 2, "3 device.* replicas of 2"),
        (["CPU:0"], 0, "whole number; got 0"),
    ],
)
def test_impossible_topologies_are_refused(devices, size, message):
    with pytest.raises(ValueError, match=message):
        rx.Topology.of(devices, logical_devices_per_replica=size)


def test_replicas_need_equally_many_devices():
    a, b, c = jax.devices()[:3]
    with pytest.raises(ValueError, match="same number of logical devices"):
        rx.Topology(((a, b), (c,)))
