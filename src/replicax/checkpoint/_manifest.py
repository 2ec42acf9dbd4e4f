"""The manifest of a checkpoint: the list of its arrays, and everything else that is saved."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax.variables import Part, WorkerParts

if TYPE_CHECKING:
    from replicax._typing import Json

# A plain Python value, which is stored in the manifest itself.
Plain: TypeAlias = "bool | int | float | str | None"
Saved = TypeVar("Saved")

_FORMAT, _VERSION = "replicax checkpoint", 1
_PLAIN = (type(None), bool, int, float, str)
_LARGEST = 2**63 - 1  # the largest count


class Unusable(Exception):
    """The reason why a checkpoint cannot be restored, as the end of a sentence."""


@final
@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """The facts about one array.

    Args:
      shape: The shape that the program sees.
      dtype: The dtype that the program sees, by name.
      keys: The implementation, if these are random keys. They are saved as numbers.
      checksum: The checksum of the numbers, once they are written. The format has checksums for its
        own structure only: an array in which a byte was changed is read without complaint.
      optional: Whether it is not an error if no object takes it.
      parts: The parts that the workers have written; None if one worker has written all of it.
    """

    shape: tuple[int, ...]
    dtype: str
    keys: str | None
    checksum: int | None = None
    optional: bool = False
    parts: WorkerParts | None = None

    @classmethod
    def of(cls, value: jax.Array | np.ndarray, optional: bool = False) -> ArrayFacts:
        keys = str(jax.random.key_impl(value)) if is_key(value) else None
        return cls(tuple(value.shape), dtype_name(value.dtype), keys, optional=optional)

    def of_part(self, part: Part) -> ArrayFacts:
        """Return the facts about one of its parts, which is an array of its own."""
        shape = tuple(stop - start for start, stop in part.ranges(self.shape))
        return ArrayFacts(shape, self.dtype, None)

    def _without_elements(self) -> np.ndarray:
        """Return an array without elements."""
        if self.keys is None:
            return np.zeros(self.shape, jnp.dtype(self.dtype))
        one = jax.random.key_data(jax.random.key(0, impl=self.keys))
        return np.zeros((*self.shape, *one.shape), one.dtype)

    def value(self, numbers: np.ndarray | None) -> jax.Array | np.ndarray:
        """Return the value saved as `numbers`, which are None if the array is not written."""
        if numbers is None and 0 not in self.shape:
            raise Unusable("not there")
        try:
            value = numbers = self._without_elements() if numbers is None else numbers
            right = checksum_of(numbers) == self.checksum
            if self.keys is not None:
                value = jax.random.wrap_key_data(jnp.asarray(numbers), impl=self.keys)
            shape, dtype = tuple(value.shape), dtype_name(value.dtype)
        except Exception as error:  # a manifest that was tampered with may cause any error
            raise Unusable(f"not what the manifest says it is: {error}") from error
        if not right:
            raise Unusable("damaged: its checksum is not right")
        if (shape, dtype) != (self.shape, self.dtype):
            raise Unusable(
                f"{dtype}{list(shape)}, and {self.dtype}{list(self.shape)} by the manifest"
            )
        return value


@final
@dataclass(frozen=True, slots=True)
class Position:
    """The positions of the workers, in their order, or a single one if they share it."""

    shared: bool
    states: list[Json]


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint apart from the arrays.

    Args:
      saves: The number of saves, including this one.
      workers: The number of workers that have saved it.
      arrays: The facts about each array.
      values: Plain Python values.
      positions: The positions of iterators.
      run_calls: The number of calls that a `PreemptionCheckpointHandler` had made by then.
      save_id: The name of this save, which the manifests of its parts have too; None without parts.
    """

    saves: int
    workers: int
    arrays: Mapping[str, ArrayFacts]
    values: Mapping[str, Plain]
    positions: Mapping[str, Position]
    run_calls: int = 0
    save_id: str | None = None

    def with_checksums(self, arrays: Mapping[str, np.ndarray]) -> Manifest:
        facts = {
            key: replace(self.arrays[key], checksum=checksum_of(numbers))
            for key, numbers in arrays.items()
        }
        return replace(self, arrays={**self.arrays, **facts})

    def narrowed_to(self, keys: Collection[str]) -> Manifest:
        """Return the manifest as if nothing but these keys had been saved."""

        def among(saved: Mapping[str, Saved]) -> dict[str, Saved]:
            return {key: value for key, value in saved.items() if key in keys}

        return replace(
            self,
            arrays=among(self.arrays),
            values=among(self.values),
            positions=among(self.positions),
        )

    def to_json(self) -> dict[str, Json]:
        content = json.loads(json.dumps(asdict(self)))
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "checksum": _checksum(content),
            "content": content,
        }

    @classmethod
    def from_json(cls, written: object) -> Manifest:
        if not isinstance(written, dict) or written.get("format") != _FORMAT:
            raise Unusable("it has been written by another program")
        if written.get("version") != _VERSION:
            raise Unusable(
                f"it is of version {written.get('version')} of the format, and this is a program "
                f"for version {_VERSION}"
            )
        content: Json = written.get("content")
        if _checksum(content) != written.get("checksum"):
            raise Unusable("its manifest is damaged: the checksum is not right")
        try:
            return cls._checked(**content)
        except (TypeError, ValueError, AttributeError) as error:
            # Right checksum, wrong content: this was neither replicax nor an accident.
            raise Unusable(f"its manifest has been tampered with: {error}") from error

    @classmethod
    def _checked(
        cls,
        saves: Json,
        workers: Json,
        arrays: Json,
        values: Json,
        positions: Json,
        run_calls: Json = 0,
        save_id: Json = None,
    ) -> Manifest:
        for name, count, least in (
            ("saves", saves, 0),
            ("workers", workers, 1),
            ("run_calls", run_calls, 0),
        ):
            _require(_is_count(count, least), f"{name!r} is no count")
        _require(save_id is None or isinstance(save_id, str), "'save_id' is no name")
        for key, value in values.items():
            _require(type(value) in _PLAIN, f"the value {key!r} is no plain value")
        return cls(
            saves,
            workers,
            {key: _checked_facts(key, workers, **facts) for key, facts in arrays.items()},
            dict(values),
            {key: _checked_position(key, workers, **each) for key, each in positions.items()},
            run_calls,
            save_id,
        )

    @property
    def checksum(self) -> int:
        return self.to_json()["checksum"]


def _checked_facts(
    key: str,
    workers: int,
    shape: Json,
    dtype: Json,
    keys: Json,
    checksum: Json = None,
    optional: Json = False,
    parts: Json = None,
) -> ArrayFacts:
    right = (
        isinstance(shape, list)
        and all(_is_count(size) for size in shape)
        and isinstance(dtype, str)
        and (keys is None or isinstance(keys, str))
        and (checksum is None or _is_count(checksum))
        and isinstance(optional, bool)
    )
    _require(right, f"the array {key!r} is not described as one")
    divided = None if parts is None else _checked_parts(key, workers, shape, **parts)
    return ArrayFacts(tuple(shape), dtype, keys, checksum, optional, divided)


def _checked_parts(
    key: str, workers: int, shape: list[int], axis: Json, bounds: Json
) -> WorkerParts:
    right = (
        _is_count(axis)
        and axis < len(shape)
        and isinstance(bounds, list)
        and len(bounds) == workers + 1
        and all(_is_count(bound) for bound in bounds)
        and bounds == sorted(bounds)
        and bounds[:1] + bounds[-1:] == [0, shape[axis]]
    )
    _require(right, f"the parts of the array {key!r} are not all of it")
    return WorkerParts(axis, tuple(bounds))


def _checked_position(key: str, workers: int, shared: Json, states: Json) -> Position:
    right = (
        isinstance(shared, bool)
        and isinstance(states, list)
        and len(states) == (1 if shared else workers)
    )
    _require(right, f"the position {key!r} is not one of {workers} worker(s)")
    return Position(shared, states)


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def is_key(value: object) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def dtype_name(dtype: object) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


def checksum_of(numbers: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
