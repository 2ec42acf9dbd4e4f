"""The published figures of chips: the one table that estimates of time rest on.

It is also in docs/planning.md; a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

_GIB = 2**30


@final
@dataclass(frozen=True, slots=True)
class Chip:
    """Figures of one chip.

    Args:
      name: Its name in topologies.
      devices: The number of JAX devices that it counts as.
      usable_memory: Bytes of the chip's memory that XLA lets a program use.
      memory_bandwidth: Bytes per second.
      peak_flops: Floating point operations per second, in bfloat16.
      link_bandwidth: Bytes per second that a chip sends to all of its neighbours together: half of
        the published figure, which counts both directions.
      links: The number of these neighbours.
      wraps_at: Along an axis whose size is a multiple of this number, the last chip is a neighbour
        of the first.
      source: Where these figures are published.
    """

    name: str
    devices: int
    usable_memory: int
    memory_bandwidth: float
    peak_flops: float
    link_bandwidth: float
    links: int
    wraps_at: int
    source: str

    def share(self, count: float) -> float:
        """Return one JAX device's share of a figure of the chip."""
        return count / self.devices


# `usable_memory` is what libtpu 0.0.42.1's compiler reports when a program does not fit. It is a
# little less than the published size: 16 GB, 32 GB, 32 GiB, 95 GiB and 192 GiB.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            devices=1,
            usable_memory=int(30.75 * _GIB),
            memory_bandwidth=1200e9,
            peak_flops=275e12,
            link_bandwidth=270e9,
            links=6,
            wraps_at=4,
            source="https://docs.cloud.google.com/tpu/docs/v4, links: "
            "https://jax-ml.github.io/scaling-book/tpus/",
        ),
        Chip(
            "v5e",
            devices=1,
            usable_memory=int(15.75 * _GIB),
            memory_bandwidth=819e9,
            peak_flops=197e12,
            link_bandwidth=200e9,
            links=4,
            wraps_at=16,
            source="https://docs.cloud.google.com/tpu/docs/v5e",
        ),
        Chip(
            "v5p",
            devices=1,
            usable_memory=int(95.74 * _GIB),
            memory_bandwidth=2765e9,
            peak_flops=459e12,
            link_bandwidth=600e9,
            links=6,
            wraps_at=4,
            source="https://docs.cloud.google.com/tpu/docs/v5p",
        ),
        Chip(
            "v6e",
            devices=1,
            usable_memory=int(31.25 * _GIB),
            memory_bandwidth=1638e9,
            peak_flops=918e12,
            link_bandwidth=400e9,
            links=4,
            wraps_at=16,
            source="https://docs.cloud.google.com/tpu/docs/v6e",
        ),
        Chip(
            "tpu7x",
            devices=2,
            usable_memory=int(189.5 * _GIB),
            memory_bandwidth=7380e9,
            peak_flops=2307e12,
            link_bandwidth=600e9,
            links=6,
            wraps_at=4,
            source="https://docs.cloud.google.com/tpu/docs/tpu7x",
        ),
    )
}
