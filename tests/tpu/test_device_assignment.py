"""The cores of each replica, compared with the assignment of TensorFlow 2.21.

`recorded_assignments.jsonl` has its results: the numbers of the devices of each replica, which lie
in the mesh core by core first, and then along x, y and z.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import replicax as rx
from replicax.tpu._device_assignment import ring
from replicax.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("recorded_assignments.jsonl").read_text().splitlines()
]


def mesh(x, y, z, cores, without=()):
    places = [[i, j, k, core] for k, j, i, core in np.ndindex(z, y, x, cores)]
    return Topology([x, y, z, cores], [[place for place in places if place not in without]])


def ordinals(assignment):
    return [
        [assignment.tpu_ordinal(replica, core) for core in range(assignment.num_cores_per_replica)]
        for replica in range(assignment.num_replicas)
    ]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: json.dumps(list(case.values())[:-1]))
def test_what_tensorflow_builds(case):
    assignment = DeviceAssignment.build(
        mesh(*case["mesh_shape"]),
        computation_shape=case["computation_shape"],
        computation_stride=case["computation_stride"],
        num_replicas=case["num_replicas"],
        device_order_mode=DeviceOrderMode[case["order"]],
    )
    assert ordinals(assignment) == case["ordinals"]


def test_by_default_one_replica_is_one_core():
    assignment = DeviceAssignment.build(mesh(2, 2, 1, 2))
    assert ordinals(assignment) == [[0]]
    assert assignment.core_assignment.tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 6, 1), (1, 4, 2), (4, 1, 2), (2, 4, 6)])
def test_in_a_ring_every_chip_is_next_to_the_one_before(sizes):
    chips = ring(sizes)
    assert sorted(chips) == list(np.ndindex(*sizes))
    for chip, before in zip(chips, chips[-1:] + chips[:-1], strict=True):
        assert np.abs(np.subtract(chip, before)).sum() == 1


def test_where_devices_are_missing_the_others_are_taken_in_order():
    degraded = mesh(2, 2, 1, 2, without=[[1, 0, 0, 0], [1, 0, 0, 1]])
    assignment = DeviceAssignment.build(degraded, [1, 1, 1, 2], num_replicas=3)
    assert ordinals(assignment) == [[0, 1], [2, 3], [4, 5]]
    assert assignment.coordinates(1, 0) == (0, 1, 0, 0)
    with pytest.raises(ValueError, match=r"2 device\(s\) of the mesh are missing"):
        DeviceAssignment.build(degraded, [1, 1, 1, 2], num_replicas=4)
    with pytest.raises(ValueError, match="of a mesh with missing devices"):
        DeviceAssignment.build(
            degraded, [1, 1, 1, 2], num_replicas=3, device_order_mode=DeviceOrderMode.RING
        )
    with pytest.raises(ValueError, match="without a stride"):
        DeviceAssignment.build(degraded, computation_stride=[2, 1, 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"computation_shape": [1, 1, 2]}, r"`computation_shape` .* \[4\]; got .* \[3\]"),
        ({"computation_shape": [1, 1, 1, 0]}, r"must be positive; got \[1, 1, 1, 0\]"),
        ({"computation_shape": "all"}, "whole numbers; got 'all'"),
        ({"computation_stride": [1, 1]}, r"`computation_stride` .* \[4\]; got .* \[2\]"),
        ({"computation_stride": [1, 1, 1, -1]}, "must be positive"),
        ({"computation_shape": [1, 2, 2, 2]}, r"room for 0 replica\(s\) .* \[1, 2, 2, 2\]"),
        ({"computation_shape": [2, 1, 1, 1], "computation_stride": [2, 1, 1, 1]}, "room for 0"),
        ({"num_replicas": 9}, "room for 8 .* got `num_replicas` 9"),
        ({"computation_shape": [1, 1, 1, 2], "num_replicas": 5}, "room for 4"),
        ({"num_replicas": 0}, "must be positive; got 0"),
        ({"num_replicas": 1.0}, "whole number; got 1.0"),
        ({"device_order_mode": DeviceOrderMode.RING}, "Use `DeviceOrderMode.AUTO`"),
        ({"device_order_mode": 7}, "must be a DeviceOrderMode; got 7"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment.build(mesh(2, 2, 1, 2), **arguments)


def test_an_assignment_by_hand():
    assignment = DeviceAssignment(
        mesh(2, 2, 1, 2), [[[1, 1, 0, 1], [0, 0, 0, 0]], [[1, 0, 0, 0], [0, 1, 0, 0]]]
    )
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 2)
    assert assignment.coordinates(0, 0) == (1, 1, 0, 1)
    assert ordinals(assignment) == [[7, 0], [2, 4]]
    assert assignment.tpu_device(1, 1) == "/task:0/device:TPU:4"
    assert assignment.tpu_device(1, 1, job="worker") == "/job:worker/task:0/device:TPU:4"
    assert assignment.host_device(1, 1) == "/task:0/device:CPU:0"
    assert assignment.host_device(job="worker") == "/job:worker/task:0/device:CPU:0"
    assert assignment.topology == mesh(2, 2, 1, 2)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ([[0, 0, 0, 0]], r"`core_assignment` .* got one of shape \[1, 4\]"),
        ([[[0, 0, 0]]], r"got one of shape \[1, 1, 3\]"),
        ([[[2, 0, 0, 0]]], r"no device at the coordinates \[2, 0, 0, 0\]"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "more than once"),
    ],
)
def test_what_is_no_assignment_is_refused(cores, message):
    with pytest.raises(ValueError, match=message):
        DeviceAssignment(mesh(2, 2, 1, 2), cores)


def test_it_needs_a_topology():
    for make in (DeviceAssignment.build, lambda it: DeviceAssignment(it, [[[0, 0, 0, 0]]])):
        with pytest.raises(TypeError, match=r"rx\.tpu\.experimental\.Topology"):
            make(rx.Topology.of(["CPU:0"]))


def test_replicas_of_a_task():
    left = [[x, 0, 0, core] for x in range(2) for core in range(2)]
    right = [[x, 1, 0, core] for x in range(2) for core in range(2)]
    assignment = DeviceAssignment.build(
        Topology([2, 2, 1, 2], [left, right]), [1, 1, 1, 2], num_replicas=4
    )  # a ring: the last two chips are the other way round
    assert assignment.lookup_replicas(0, 0) == [0, 1]
    assert assignment.lookup_replicas(1, 1) == [2, 3]
    assert assignment.tpu_device(2, 1) == "/task:1/device:TPU:3"
    for task, core in [(2, 0), (0, 2)]:
        with pytest.raises(ValueError, match=f"logical core {core} in task {task}"):
            assignment.lookup_replicas(task, core)
    for replica, core in [(4, 0), (0, 2), (-1, 0)]:
        with pytest.raises(ValueError, match="counted from 0"):
            assignment.coordinates(replica, core)


def test_an_assignment_is_a_value():
    one, same = (DeviceAssignment.build(mesh(2, 2, 1, 2), num_replicas=2) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != DeviceAssignment.build(mesh(2, 2, 1, 2), num_replicas=3)
    assert one != "another thing"
    with pytest.raises(ValueError, match="read-only"):
        one.core_assignment[0] = 0


# The two of the reference page, on eight virtual devices


def test_four_replicas_of_two_devices():
    topology = Topology.of(jax.devices())
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    devices = [[device.id for device in replica] for replica in assignment.devices]
    assert devices == [[0, 1], [2, 3], [6, 7], [4, 5]]


def test_one_replica_of_eight_devices():
    topology = Topology.of(jax.devices())
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 2, 2, 2], num_replicas=1)
    (devices,) = assignment.devices
    assert sorted(device.id for device in devices) == list(range(8))
