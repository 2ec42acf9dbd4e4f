"""The caller's options for a collective."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp

from replicax._describing import described
from replicax._seconds import require_seconds
from replicax.errors import InvalidArgument


class CommunicationImplementation(enum.Enum):
    """The library that should carry the data. XLA chooses; RING and NCCL are preferences."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, slots=True)
class CollectiveHints:
    """Hints for one collective call; 0 and None leave the choice to replicax.

    With `timeout_seconds=math.inf` there is no limit.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self.bytes_per_pack, self.timeout_seconds)


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """The hints of `CollectiveHints`, and the preferred implementation.

    With `dtype="bfloat16"` (or "float16"), float32 values are reduced in that type: half the bytes,
    and a relative error of up to about 1e-2. It is off by default.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    dtype: str | None = None

    def wire_dtype(self, dtype: object) -> Any:
        """Return the type in which values of `dtype` are combined."""
        return jnp.dtype(self.dtype) if self.dtype and dtype == jnp.float32 else dtype

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bfloat16", "float16"):
            raise InvalidArgument(
                f'`dtype` must be None, "bfloat16" or "float16"; got {self.dtype!r}.'
            )
        _check(self.bytes_per_pack, self.timeout_seconds)
        if not isinstance(self.implementation, CommunicationImplementation):
            raise InvalidArgument(
                "`implementation` must be a CommunicationImplementation; got "
                f"{self.implementation!r}."
            )


def _check(bytes_per_pack: int, timeout_seconds: float | None) -> None:
    if bytes_per_pack < 0:
        raise InvalidArgument(f"`bytes_per_pack` must be 0 or more; got {bytes_per_pack!r}.")
    if timeout_seconds is not None:
        require_seconds("`timeout_seconds`", timeout_seconds, zero=False)


Hints: TypeAlias = CommunicationOptions | CollectiveHints | None


def merge_options(
    options: Hints,
    hints: Hints,
    usual: CommunicationOptions,
) -> CommunicationOptions:
    """Return the options given by one of two keywords that mean the same, or the usual ones."""
    if options is not None and hints is not None:
        raise InvalidArgument("Give either `options` or `experimental_hints`, not both.")
    given = hints if options is None else options
    if given is None:
        return usual
    if isinstance(given, CommunicationOptions):
        return given
    if isinstance(given, CollectiveHints):
        return CommunicationOptions(given.bytes_per_pack, given.timeout_seconds)
    raise InvalidArgument(
        f"Options must be CommunicationOptions or CollectiveHints; got {described(given)}."
    )
