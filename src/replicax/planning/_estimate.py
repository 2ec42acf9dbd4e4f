"""The time of a step, from published figures of the chip; nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from replicax.planning._chips import Chip
from replicax.planning._collectives import Collective


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated duration of a step, in seconds.

    Args:
      compute: The time for floating point operations, at the published peak.
      memory: The time for reading from and writing to the chip's memory.
      communication: The time for sending to other chips.
    """

    compute: float
    memory: float
    communication: float

    @property
    def step(self) -> float:
        """The total: computing and memory accesses overlap, and communication is added."""
        return max(self.compute, self.memory) + self.communication

    @property
    def bound(self) -> str:
        """The largest part of the time: "compute", "memory" or "communication"."""
        return max(("compute", "memory", "communication"), key=lambda name: getattr(self, name))


def estimate(
    chip: Chip,
    sides: Sequence[int],
    flops: float,
    bytes_accessed: float,
    collectives: Sequence[Collective],
) -> Estimate:
    """Estimate the time of a step: the work of a device, divided by its speed.

    Args:
      chip: The published figures of the chip.
      sides: The sides of the grid of chips.
      flops: Floating point operations of one device.
      bytes_accessed: Bytes that one device reads and writes.
      collectives: The collectives that it takes part in.
    """
    devices = math.prod(sides) * chip.devices
    seconds = sum(
        each.sent_bytes / link_bandwidth(chip, sides, each.group_size == devices)
        for each in collectives
    )
    return Estimate(
        flops / chip.share(chip.peak_flops),
        bytes_accessed / chip.share(chip.memory_bandwidth),
        seconds,
    )


def link_bandwidth(chip: Chip, sides: Sequence[int], everybody: bool) -> float:
    """Return the bytes per second that a device can send in a collective.

    Along each axis of the grid, a chip can send to two neighbours if the axis closes into a ring,
    and to one otherwise. A collective of all chips uses all axes, and a collective of some of them
    uses a single axis.
    """
    links = [2 if side % chip.wraps_at == 0 else 1 for side in sides if side > 1] or [1]
    used = min(sum(links), chip.links) if everybody else max(links)
    return chip.share(chip.link_bandwidth * used / chip.links)
