"""The versions of jaxlib that are known to be broken, and the XLA flags that cure some of them.

The requirements in `pyproject.toml` exclude every version in `DEFECTS`, and the table in
`docs/install.md` is made from it (`docs/support_table.py`); a test compares the three.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import final

from replicax._deprecation import frames_to_the_user
from replicax._jax_compat import backends_are_initialized
from replicax._once import first_time
from replicax.errors import KnownBadVersion


@final
@dataclass(frozen=True, slots=True)
class Defect:
    """Something that is wrong with some versions of jaxlib.

    Args:
      versions: The versions, spelled out.
      platform: The platform of the devices on which it occurs.
      symptom: What happens, as the end of a sentence about jaxlib.
      thread: The public thread about it; empty if none is known.
      cure: The XLA flag that prevents it; empty if there is none.
    """

    versions: tuple[str, ...]
    platform: str
    symptom: str
    thread: str = ""
    cure: str = ""

    @property
    def cured(self) -> bool:
        """True if the environment has the flag that cures it."""
        return bool(self.cure) and self.cure in _flags()

    def __str__(self) -> str:
        return f"{self.symptom} ({self.thread})" if self.thread else self.symptom


_WITHOUT_YNN_REDUCTIONS = "--xla_cpu_experimental_ynn_fusion_type=individual_dot"

# Seen with the programs in `doctor/_numbers_worker.py`, on each version from 0.10.1 to 0.12.0.1.
DEFECTS = (
    Defect(
        ("0.10.2",),
        "cpu",
        "computes wrong numbers in compiled programs: matrix-vector products under `jax.vmap` that "
        "are then summed",
        "jax-ml/jax#39103",
        _WITHOUT_YNN_REDUCTIONS,
    ),
    Defect(
        ("0.10.2", "0.11.0"),
        "cpu",
        "crashes in sums of products of arrays with seven or more dimensions",
        "jax-ml/jax#39257",
        _WITHOUT_YNN_REDUCTIONS,
    ),
    Defect(
        ("0.11.2",),
        "cpu",
        "crashes in programs over several devices that use an empty array, such as the share of a "
        "replica without rows",
    ),
)


@functools.cache
def installed_version() -> str:
    """Return the installed version of jaxlib."""
    return metadata.version("jaxlib")


def defects_of(version: str) -> list[Defect]:
    """Return the known defects of a version of jaxlib.

    >>> from replicax._known_bad import defects_of
    >>> [defect.thread for defect in defects_of("0.10.2")]
    ['jax-ml/jax#39103', 'jax-ml/jax#39257']
    >>> defects_of("0.10.1")
    []
    """
    return [defect for defect in DEFECTS if version in defect.versions]


def advice() -> str:
    """Return the command that installs a version without known defects."""
    excluded = sorted({version for defect in DEFECTS for version in defect.versions})
    without = ",".join(f"!={version}" for version in excluded)
    return f"pip install --upgrade 'jax{without}' 'jaxlib{without}'"


def missing_cures() -> list[str]:
    """Return the XLA flags that would cure the installed jaxlib and can be added to XLA_FLAGS.

    A flag that the user has set to another value is left alone; so is XLA_FLAGS if it names a file.
    """
    flags = _flags()
    if flags and not flags[0].startswith("-"):
        return []
    names_set = {flag.partition("=")[0] for flag in flags}
    cures = dict.fromkeys(defect.cure for defect in defects_of(installed_version()))
    return [cure for cure in cures if cure and cure.partition("=")[0] not in names_set]


def set_curing_flags() -> None:
    """Set the XLA flags that cure the installed jaxlib, while they still have an effect.

    XLA reads them when the first backend starts.
    """
    missing = missing_cures()
    if missing and not backends_are_initialized():
        os.environ["XLA_FLAGS"] = with_flags(missing)


def with_flags(flags: Iterable[str]) -> str:
    """Return the value of XLA_FLAGS with these flags added."""
    return " ".join([*_flags(), *flags])


def warn_of_defects(platforms: Iterable[str]) -> None:
    """Warn, once per process, of the defects of the installed jaxlib on these platforms."""
    version, present = installed_version(), set(platforms)
    defects = [
        defect for defect in defects_of(version) if defect.platform in present and not defect.cured
    ]
    if not defects or not first_time("a broken jaxlib"):
        return
    missing = missing_cures()
    flags = (
        f", or set XLA_FLAGS={with_flags(missing)!r} before JAX is first used" if missing else ""
    )
    warnings.warn(
        f"jaxlib {version} is known to be broken: on {defects[0].platform} devices it "
        f"{'; it '.join(map(str, defects))}. Install another version ({advice()}){flags}; then "
        "run `replicax doctor`.",
        KnownBadVersion,
        stacklevel=frames_to_the_user(),
    )


def _flags() -> list[str]:
    return os.environ.get("XLA_FLAGS", "").split()
