"""What the doctor finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


@final
class Verdict(enum.Enum):
    """What is to be made of a check."""

    OK = "ok"
    NOTE = "note"  # worth knowing, and no fault
    PROBLEM = "problem"


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Args:
      verdict: What is to be made of it.
      name: What was looked at.
      found: What was seen there.
      advice: What to do, as sentences; every problem has some.
    """

    verdict: Verdict
    name: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    """A check that all is well with.

    >>> from replicax.doctor._check import ok
    >>> ok("jax", "0.10.1").verdict.value
    'ok'
    """
    return Check(Verdict.OK, name, found)


def note(name: str, found: str, advice: str = "") -> Check:
    """A check with something worth knowing."""
    return Check(Verdict.NOTE, name, found, advice)


def problem(name: str, found: str, advice: str) -> Check:
    """A check with something to be put right."""
    return Check(Verdict.PROBLEM, name, found, advice)
