"""What is written next to the arrays of a checkpoint: which there are, and everything else."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

_FORMAT, _VERSION = "replicax checkpoint", 1


class Unusable(Exception):
    """Why a checkpoint cannot be restored, as the end of a sentence."""


@final
@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """Of one array.

    Args:
      shape: As the program sees it.
      dtype: The same, by name.
      keys: The implementation, if these are keys of random numbers. They are saved as numbers.
      checksum: Of the numbers, once they are written. The format has checksums for its own
        structure only: an array in which a byte was changed is read without complaint.
      optional: Whether nothing is amiss if nobody wants it.
    """

    shape: tuple[int, ...]
    dtype: str
    keys: str | None
    checksum: int | None = None
    optional: bool = False

    @classmethod
    def of(cls, value: Any, optional: bool) -> ArrayFacts:
        keys = str(jax.random.key_impl(value)) if is_key(value) else None
        return cls(tuple(value.shape), dtype_name(value.dtype), keys, optional=optional)

    def without_elements(self) -> np.ndarray:
        """Return the numbers of an array that has none."""
        if self.keys is None:
            return np.zeros(self.shape, jnp.dtype(self.dtype))
        one = jax.random.key_data(jax.random.key(0, impl=self.keys))
        return np.zeros((*self.shape, *one.shape), one.dtype)

    def value(self, numbers: np.ndarray) -> Any:
        """Return what was saved as these numbers."""
        if self.keys is not None:
            return jax.random.wrap_key_data(jnp.asarray(numbers), impl=self.keys)
        return numbers


@final
@dataclass(frozen=True, slots=True)
class Position:
    """How far the workers had come, in their order; or all of them, if that is the same."""

    shared: bool
    states: list[Any]


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything but the arrays.

    Args:
      saves: How many times the checkpoint has been saved, with this one.
      workers: How many have saved it.
      arrays: What is known of each.
      values: Plain Python values.
      positions: Of iterators.
      run_calls: How many calls a `PreemptionCheckpointHandler` had made by then.
    """

    saves: int
    workers: int
    arrays: Mapping[str, ArrayFacts]
    values: Mapping[str, Any]
    positions: Mapping[str, Position]
    run_calls: int = 0

    def with_checksums(self, arrays: Mapping[str, np.ndarray]) -> Manifest:
        facts = {
            key: replace(self.arrays[key], checksum=checksum_of(numbers))
            for key, numbers in arrays.items()
        }
        return replace(self, arrays=facts)

    def narrowed_to(self, keys: Collection[str]) -> Manifest:
        """Return the same, as if nothing but these had been saved."""

        def among(saved: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in saved.items() if key in keys}

        return replace(
            self,
            arrays=among(self.arrays),
            values=among(self.values),
            positions=among(self.positions),
        )

    def to_json(self) -> dict[str, Any]:
        content = json.loads(json.dumps(asdict(self)))
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "checksum": _checksum(content),
            "content": content,
        }

    @classmethod
    def from_json(cls, written: Any) -> Manifest:
        if not isinstance(written, dict) or written.get("format") != _FORMAT:
            raise Unusable("it has been written by another program")
        if written.get("version") != _VERSION:
            raise Unusable(
                f"it is of version {written.get('version')} of the format, and this is a program "
                f"for version {_VERSION}"
            )
        content: dict[str, Any] = written.get("content", {})
        if _checksum(content) != written.get("checksum"):
            raise Unusable("its manifest is damaged: the checksum is not right")
        arrays = {
            key: ArrayFacts(tuple(facts.pop("shape")), **facts)
            for key, facts in content.pop("arrays").items()
        }
        positions = {
            key: Position(**position) for key, position in content.pop("positions").items()
        }
        return cls(arrays=arrays, positions=positions, **content)

    @property
    def checksum(self) -> int:
        return self.to_json()["checksum"]


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


def checksum_of(numbers: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
