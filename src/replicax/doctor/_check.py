"""The doctor's findings."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


@final
class Verdict(enum.Enum):
    """The judgement of a check."""

    OK = "ok"
    NOTE = "note"  # worth knowing, but not a fault
    PROBLEM = "problem"


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Args:
      verdict: The judgement.
      name: The subject of the check.
      found: What was found.
      advice: What to do, as sentences; every problem has some.
    """

    verdict: Verdict
    name: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """Return a check that found nothing wrong.

    >>> from replicax.doctor._check import ok
    >>> ok("jax", "0.10.1").verdict.value
    'ok'
    """
    return Check(Verdict.OK, name, found)


def note(name: str, found: str, advice: str = "") -> Check:
    """Return a check that found something worth knowing."""
    return Check(Verdict.NOTE, name, found, advice)


def problem(name: str, found: str, advice: str) -> Check:
    """Return a check that found a problem to fix."""
    return Check(Verdict.PROBLEM, name, found, advice)
