"""The positions of cores: as TPUs report them, and as a grid for other devices."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import replicax as rx
from replicax.tpu.experimental import Topology, initialize_tpu_system, shutdown_tpu_system

# Two tasks with two chips of two cores each, side by side.
TWO_TASKS = [
    [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]],
    [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]],
]


def tpus(places, *, process=lambda index: 0, slices=None):
    """Devices that say where they lie, as the TPUs of JAX do."""
    return [
        FakeTPU(index, tuple(place[:3]), place[3], process(index), slices and slices[index])
        for index, place in enumerate(places)
    ]


class FakeTPU(SimpleNamespace):
    platform = "tpu"
    __hash__ = object.__hash__

    def __init__(self, index, coords, core, process, slice_index):
        super().__init__(id=index, coords=coords, core_on_chip=core, process_index=process)
        if slice_index is not None:
            self.slice_index = slice_index


@pytest.fixture
def any_device(monkeypatch):
    """Lets devices pass that are only made up."""
    monkeypatch.setattr("replicax.tpu._topology.resolve_devices", tuple)


def test_facts():
    topology = Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=TWO_TASKS)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.mesh_rank == 4
    assert topology.device_coordinates.tolist() == TWO_TASKS
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    assert topology.missing_devices.shape == (0, 4)


def test_what_is_at_coordinates():
    topology = Topology([2, 2, 1, 2], TWO_TASKS)
    for task, places in enumerate(TWO_TASKS):
        for ordinal, place in enumerate(places):
            assert topology.task_ordinal_at_coordinates(place) == task
            assert topology.tpu_device_ordinal_at_coordinates(np.array(place)) == ordinal
    place = (1, 1, 0, 0)
    assert topology.tpu_device_name_at_coordinates(place) == "/task:1/device:TPU:2"
    assert topology.tpu_device_name_at_coordinates(place, "tpu") == "/job:tpu/task:1/device:TPU:2"
    assert topology.cpu_device_name_at_coordinates(place) == "/task:1/device:CPU:0"
    assert topology.cpu_device_name_at_coordinates(place, "tpu") == "/job:tpu/task:1/device:CPU:0"


def test_missing_devices():
    topology = Topology([2, 2, 1, 2], [TWO_TASKS[0]])
    assert topology.missing_devices.tolist() == TWO_TASKS[1][:2] + TWO_TASKS[1][2:]
    with pytest.raises(ValueError, match="no device there"):
        topology.task_ordinal_at_coordinates([0, 1, 0, 0])


def test_a_topology_is_a_value():
    one, same = Topology([2, 2, 1, 2], TWO_TASKS), Topology([2, 2, 1, 2], np.array(TWO_TASKS))
    assert one == same
    assert hash(one) == hash(same)
    assert one != Topology([2, 3, 1, 2], TWO_TASKS)
    assert one != "another thing"
    for array in (one.mesh_shape, one.device_coordinates):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


@pytest.mark.parametrize(
    ("mesh_shape", "coordinates", "message"),
    [
        ([2, 2, 1], TWO_TASKS, r"`mesh_shape` must be an array of shape \[4\]"),
        ([2, 2, 1, 0], TWO_TASKS, r"must be positive; got \[2, 2, 1, 0\]"),
        ([2, 2, 1, 1.5], TWO_TASKS, "whole numbers"),
        (None, TWO_TASKS, "whole numbers"),
        ([2, 2, 1, 2], TWO_TASKS[0], r"shape \[n, n, 4\]; got one of shape \[4, 4\]"),
        ([2, 2, 1, 2], [[[0, 0, 0]]], r"got one of shape \[1, 1, 3\]"),
        ([2, 2, 1, 2], [[[0, 0, 0, 0]], []], "whole numbers"),
        ([2, 2, 1, 2], [[]], "got one of shape"),
        ([1, 2, 1, 2], TWO_TASKS, r"Device 2 of task 0 .* \[1, 0, 0, 0\]"),
        ([2, 2, 1, 2], [[[0, 0, 0, -1]]], r"\[0, 0, 0, -1\], which the mesh"),
        ([2, 2, 1, 2], [[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "more than once"),
    ],
)
def test_what_is_no_topology_is_refused(mesh_shape, coordinates, message):
    with pytest.raises(ValueError, match=message):
        Topology(mesh_shape, coordinates)


@pytest.mark.parametrize("place", [[2, 0, 0, 0], [0, 0, 0, -1], [0, 0, 0]])
def test_coordinates_outside_of_the_mesh_are_refused(place):
    with pytest.raises(ValueError, match="There is no device at the coordinates"):
        Topology([2, 2, 1, 2], TWO_TASKS).tpu_device_ordinal_at_coordinates(place)


def test_one_that_was_written_down_has_no_devices():
    with pytest.raises(rx.errors.DeviceError, match="initialize_tpu_system"):
        Topology([2, 2, 1, 2], TWO_TASKS).device_at_coordinates([0, 0, 0, 0])


def test_there_is_a_device_for_each_place():
    devices = jax.devices()
    topology = Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]], [devices[:2]])
    assert topology.device_at_coordinates([1, 0, 0, 0]) is devices[1]
    with pytest.raises(ValueError, match=r"got \[3\] device"):
        Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]], [devices[:3]])


# Of devices


@pytest.mark.parametrize(
    ("count", "shape"),
    [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 2]), (3, [1, 1, 3, 1]), (4, [1, 1, 2, 2]),
     (6, [1, 1, 3, 2]), (7, [1, 1, 7, 1]), (8, [1, 2, 2, 2])],
)  # fmt: skip
def test_virtual_devices_are_laid_out_in_a_block(count, shape):
    topology = Topology.of(jax.devices()[:count])
    assert topology.mesh_shape.tolist() == shape
    assert topology.missing_devices.size == 0
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, count)
    for device, place in zip(jax.devices(), topology.device_coordinates[0], strict=False):
        assert topology.device_at_coordinates(place) is device


def test_they_are_laid_out_in_the_order_of_a_real_tpu():
    topology = Topology.of([f"CPU:{index}" for index in range(8)], mesh_shape=[2, 2, 1, 2])
    assert topology.device_coordinates.tolist() == [TWO_TASKS[0] + TWO_TASKS[1]]


def test_a_mesh_has_as_many_places_as_there_are_devices():
    with pytest.raises(ValueError, match=r"\[2, 2, 1, 1\] has 4 device\(s\); got 8"):
        Topology.of(jax.devices(), mesh_shape=[2, 2, 1, 1])
    with pytest.raises(rx.errors.DeviceError, match="none was given"):
        Topology.of([])


# The places below are those in libtpu's descriptions of such TPUs.


@pytest.mark.usefixtures("any_device")
def test_tpus_say_where_they_lie():
    v3_8 = tpus(TWO_TASKS[0] + TWO_TASKS[1])
    topology = Topology.of(v3_8)
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.device_at_coordinates([0, 1, 0, 1]) is v3_8[5]
    with pytest.raises(ValueError, match="TPUs know where they lie"):
        Topology.of(v3_8, mesh_shape=[1, 2, 2, 2])


@pytest.mark.usefixtures("any_device")
def test_tpus_of_several_hosts():
    places = [[x, y, 0, 0] for y in range(4) for x in range(2)]
    v5e_8 = tpus(places, process=lambda index: index // 4)
    topology = Topology.of(reversed(v5e_8[4:] + v5e_8[:4]))
    assert topology.mesh_shape.tolist() == [2, 4, 1, 1]
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    assert topology.task_ordinal_at_coordinates([0, 2, 0, 0]) == 1
    assert topology.device_at_coordinates([1, 3, 0, 0]) is v5e_8[7]


@pytest.mark.usefixtures("any_device")
def test_some_tpus_of_a_host_are_counted_from_their_corner():
    topology = Topology.of(tpus([[2, 1, 0, 0], [3, 1, 0, 0]]))
    assert topology.mesh_shape.tolist() == [2, 1, 1, 1]
    assert Topology.of(tpus([[0, 0, 0, 0], [1, 1, 0, 0]])).missing_devices.tolist() == [
        [0, 1, 0, 0],
        [1, 0, 0, 0],
    ]


@pytest.mark.usefixtures("any_device")
def test_tpus_that_lie_in_no_common_grid_are_refused():
    places = [[0, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(rx.errors.DeviceError, match="TPUs of one slice"):
        Topology.of(tpus(places, slices=[0, 1]))
    with pytest.raises(rx.errors.DeviceError, match="is no TPU"):
        Topology.of([*tpus(places[:1]), jax.devices()[0]])
    with pytest.raises(rx.errors.DeviceError, match=r"got \[2, 1\]"):
        Topology.of(tpus([[x, 0, 0, 0] for x in range(3)], process=lambda index: index // 2))


# The system


def test_the_system_is_initialized_as_often_as_one_likes():
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    strategy = rx.TPUStrategy(resolver)
    with strategy.scope():
        variable = rx.Variable(3.0)
    first, second = initialize_tpu_system(resolver), initialize_tpu_system(resolver)
    assert first == second == Topology.of(jax.devices())
    shutdown_tpu_system(resolver)
    assert float(variable) == 3.0


@pytest.mark.parametrize("call", [initialize_tpu_system, shutdown_tpu_system])
def test_the_system_is_that_of_a_tpu_resolver(call):
    with pytest.raises(TypeError, match="TPUClusterResolver"):
        call(rx.cluster_resolver.TFConfigClusterResolver())
