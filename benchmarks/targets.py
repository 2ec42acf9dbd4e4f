"""The targets of replicax, next to what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    what: str
    wanted: str
    measured: float
    met: bool

    @classmethod
    def at_least(cls, what: str, bound: float, measured: float) -> Target:
        return cls(what, f"at least {bound:g}", measured, measured >= bound)

    @classmethod
    def at_most(cls, what: str, bound: float, measured: float) -> Target:
        return cls(what, f"at most {bound:g}", measured, measured <= bound)
