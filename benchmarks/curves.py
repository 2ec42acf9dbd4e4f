"""Costs against sizes, and how they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, nan
from statistics import linear_regression


@dataclass(frozen=True)
class Curve:
    """Whose cost it is, and how much at each size."""

    label: str
    sizes: Sequence[int]
    costs: Sequence[float]

    @property
    def exponent(self) -> float:
        """The p of the power law `size**p` that fits best, by least squares of the logarithms.

        It is a number only if at least two costs are above zero. A difference of two times may be
        below, which is noise, and has no logarithm.
        """
        pairs = [
            (log(size), log(cost))
            for size, cost in zip(self.sizes, self.costs, strict=True)
            if cost > 0
        ]
        if len(pairs) < 2:
            return nan
        return linear_regression(*zip(*pairs, strict=True)).slope


@dataclass(frozen=True)
class Panel:
    """The curves of one cost."""

    what_grows: str
    cost: str
    curves: Sequence[Curve]
