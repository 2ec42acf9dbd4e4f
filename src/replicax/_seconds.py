"""Durations that callers give."""

from __future__ import annotations

import math
import numbers

from replicax._describing import described
from replicax.errors import InvalidArgument

# A longer time is a mistake or means "forever", and overflows where C counts it.
_LONGEST = 366 * 24 * 3600


def require_seconds(name: str, value: object, *, zero: bool = True, unlimited: bool = True) -> None:
    """Refuse anything but a number of seconds that can be waited for.

    Args:
      name: The name by which the caller knows it.
      value: The value given.
      zero: Whether it may be 0.
      unlimited: Whether it may be infinity, which means that there is no limit.

    >>> from replicax._seconds import require_seconds
    >>> require_seconds("`timeout`", 30)
    >>> require_seconds("`timeout`", float("nan"))
    Traceback (most recent call last):
    ...
    replicax.errors.InvalidArgument: `timeout` must be a number of seconds from 0 to 31622400 (a year), or inf for no limit; got nan.
    """  # noqa: E501 - a message is one line
    seconds = _as_float(value)
    if 0 < seconds <= _LONGEST or (zero and seconds == 0) or (unlimited and seconds == math.inf):
        return
    least = "from 0" if zero else "above 0 and up"
    infinity = ", or inf for no limit" if unlimited else ""
    raise InvalidArgument(
        f"{name} must be a number of seconds {least} to {_LONGEST} (a year){infinity}; got "
        f"{described(value)}."
    )


def _as_float(value: object) -> float:
    """Return a number as a float, or NaN, which fails every comparison, for anything else."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
