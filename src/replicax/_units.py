"""Human-readable numbers."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def of_bytes(count: float) -> str:
    """Write bytes in powers of 1024.

    >>> from replicax._units import of_bytes
    >>> of_bytes(0), of_bytes(1536), of_bytes(17 * 2**30)
    ('0 B', '1.5 KiB', '17 GiB')
    """
    step = 0
    while abs(count) >= 1024 and step < len(_BYTES) - 1:
        count /= 1024
        step += 1
    return f"{_digits(count, 4)} {_BYTES[step]}"


def of_count(count: float, unit: str = "") -> str:
    """Write a count in powers of 1000.

    >>> from replicax._units import of_count
    >>> of_count(2_066_837_760, "FLOP"), of_count(12)
    ('2.07 GFLOP', '12')
    """
    step = 0
    while abs(count) >= 1000 and step < len(_THOUSANDS) - 1:
        count /= 1000
        step += 1
    return f"{_digits(count)} {_THOUSANDS[step]}{unit}".rstrip()


def of_seconds(seconds: float) -> str:
    """Write seconds in the unit that leaves a number from 1 to 999.

    >>> from replicax._units import of_seconds
    >>> of_seconds(0.0123), of_seconds(0)
    ('12.3 ms', '0 s')
    """
    if not seconds:
        return "0 s"
    size, unit = next((each for each in _SECONDS if seconds >= each[0]), _SECONDS[-1])
    return f"{_digits(seconds / size)} {unit}"


def of_share(share: float) -> str:
    """Write a share as a percentage.

    >>> from replicax._units import of_share
    >>> of_share(0.256), of_share(0.00012), of_share(0.0)
    ('26 %', '<0.1 %', '0 %')
    """
    if 0 < share < 0.001:
        return "<0.1 %"
    return (
        f"{share:.0%}".replace("%", " %") if share >= 0.1 or not share else f"{share * 100:.1f} %"
    )


def _digits(number: float, count: int = 3) -> str:
    """Write a number with as many digits as matter."""
    return f"{number:.0f}" if number == int(number) else f"{number:.{count}g}"
