"""The timeouts that callers may ask for: one rule for all."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import replicax as rx
from replicax._seconds import require_seconds
from replicax.errors import InvalidArgument
from replicax.launch import Patience, launch

WAITS = {
    "`timeout_seconds`": lambda v: rx.experimental.CommunicationOptions(timeout_seconds=v),
    "`timeout_seconds` of hints": lambda v: rx.experimental.CollectiveHints(timeout_seconds=v),
    "`grace_period`": lambda v: rx.experimental.TerminationConfig(grace_period=v),
    "`timeout`": lambda v: rx.checkpoints_iterator("nowhere", timeout=v),
    "`min_interval_secs`": lambda v: rx.checkpoints_iterator("nowhere", min_interval_secs=v),
    "`grace`": lambda v: Patience(grace=v),
    "`backoff`": lambda v: launch(["x.py"], workers=1, backoff=v),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (-1, "-1"),
        (1e300, r"1e\+300"),
        (10**400, "1000"),
        (10**5000, "an int of 16610 bits"),
        ("5", "'5'"),
        (True, "True"),
        ([1.0], r"\[1.0\]"),
        (1j, "1j"),
    ],
    ids=["nan", "-inf", "-1", "1e300", "10**400", "10**5000", "str", "bool", "list", "complex"],
)
def test_what_is_no_wait_is_refused_everywhere(wait, value, shown):
    name = wait.partition(" of ")[0]
    with pytest.raises(InvalidArgument, match=f"^{name} must be a number of seconds .*got {shown}"):
        WAITS[wait](value)


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait != "`backoff`"])
@pytest.mark.parametrize("value", [1, 0.5, np.float32(3), np.int64(2), Fraction(1, 3), 31_622_400])
def test_any_number_is_a_wait(wait, value):
    WAITS[wait](value)


def test_infinity_is_no_limit_where_that_can_be():
    for wait in ("`timeout_seconds`", "`timeout`", "`grace`"):
        WAITS[wait](math.inf)
        WAITS[wait](np.float16(np.inf))
    # Nothing would ever be saved, and no second checkpoint ever be yielded.
    for wait in ("`grace_period`", "`min_interval_secs`"):
        with pytest.raises(InvalidArgument, match=r"to 31622400 \(a year\); got inf\.$"):
            WAITS[wait](math.inf)


def test_zero_where_that_can_be():
    require_seconds("`wait`", 0)
    with pytest.raises(InvalidArgument, match=r"above 0 and up to .*, or inf for no limit; got 0"):
        require_seconds("`wait`", 0, zero=False)
