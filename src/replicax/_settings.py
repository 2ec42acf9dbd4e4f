"""The settings of the whole process, which `rx.config` changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(slots=True)
class Settings:
    """The settings, which functions of `rx.config` check and change.

    Args:
      run_eagerly: Whether an `rx.function` runs as ordinary Python.
      check_mirrored: Whether copies are compared after each step.
      audits: Which calls of an `rx.function` are audited; None for no call.
    """

    run_eagerly: bool = False
    check_mirrored: bool = False
    audits: Any = None


settings = Settings()
