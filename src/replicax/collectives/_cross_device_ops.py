"""The reduction methods from which programs for the reference can choose."""

from __future__ import annotations

from typing import Any, final

from replicax._describing import described
from replicax.errors import InvalidArgument, InvalidType


class CrossDeviceOps:
    """Base of the reference's choices of how to combine values over devices.

    They are accepted, but have no effect: XLA chooses how devices communicate, for each program and
    kind of device. How small arrays are packed is up to `CommunicationOptions.bytes_per_pack`.
    """


@final
class NcclAllReduce(CrossDeviceOps):
    """A request for NCCL, which XLA uses on NVIDIA's GPUs in any case.

    Args:
      num_packs: Checked, but has no effect.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _require_packs(num_packs)


@final
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """A request to reduce within groups of devices, then between groups; XLA knows the links.

    Args:
      num_packs: Checked, but has no effect.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _require_packs(num_packs)


@final
class ReductionToOneDevice(CrossDeviceOps):
    """A request to copy values to one device, combine them there, and copy them back.

    Args:
      reduce_to_device: Has no effect: every device gets the result by an all-reduce.
      accumulation_fn: Must be None; values are added.
    """

    def __init__(self, reduce_to_device: Any = None, accumulation_fn: Any = None) -> None:
        if accumulation_fn is not None:
            raise InvalidArgument(
                "`accumulation_fn` must be None, because values are added; got "
                f"{described(accumulation_fn)}. Gather the values, and combine them: "
                "`accumulation_fn(strategy.experimental_local_results(value))`."
            )


def require_cross_device_ops(given: object) -> None:
    """Refuse anything but a `CrossDeviceOps` or None."""
    if given is not None and not isinstance(given, CrossDeviceOps):
        raise InvalidType(
            "`cross_device_ops` must be an `rx.CrossDeviceOps`, such as `rx.NcclAllReduce()`, or "
            f"None; got {described(given)}."
        )


def _require_packs(num_packs: object) -> None:
    if not isinstance(num_packs, int) or num_packs < 0:
        raise InvalidArgument(f"`num_packs` must be 0 or more; got {described(num_packs)}.")
