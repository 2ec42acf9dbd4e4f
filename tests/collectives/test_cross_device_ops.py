"""The reference's names for the ways in which devices reduce."""

from __future__ import annotations

import pytest
from support import equal, per_replica

import replicax as rx


@pytest.mark.parametrize("face", [rx.MirroredStrategy, rx.compat.v1.MirroredStrategy])
@pytest.mark.parametrize(
    "ops", [rx.NcclAllReduce(2), rx.HierarchicalCopyAllReduce(), rx.ReductionToOneDevice("CPU:1")]
)
def test_cross_device_ops_change_nothing(face, ops):
    assert isinstance(ops, rx.CrossDeviceOps)
    strategy = face(["CPU:0", "CPU:1"], cross_device_ops=ops)
    numbers = per_replica(strategy, [1.0, 2.0])
    equal(strategy.reduce("SUM", numbers, axis=None), 3.0)


def test_cross_device_ops_that_would_are_refused():
    with pytest.raises(ValueError, match="`accumulation_fn` must be None"):
        rx.ReductionToOneDevice(accumulation_fn=max)
    with pytest.raises(TypeError, match=r"must be an `rx\.CrossDeviceOps`"):
        rx.MirroredStrategy(["CPU:0"], cross_device_ops="nccl")
    with pytest.raises(ValueError, match="`num_packs` must be 0 or more; got -1"):
        rx.NcclAllReduce(num_packs=-1)
