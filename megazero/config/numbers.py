"""Numbers as people write them."""

from __future__ import annotations


def whole_number(value: str | int | float) -> int:
    """An integer, which may be written as 220_000_000 or 2e8. Raises ValueError."""
    try:
        return int(value) if not isinstance(value, float) else _exact(value)
    except ValueError:
        return _exact(float(value))


_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def bytes_of(value: str | int | float) -> int:
    """A number of bytes: 500000, 500KB, 1.5 GB (powers of 1000), 2GiB (of 1024), in any case. Raises ValueError."""
    words = value.strip().lower() if isinstance(value, str) else ""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if words.endswith(unit)), None)
    if unit is None:
        return whole_number(value)
    return round(float(words.removesuffix(unit)) * _UNITS[unit])


def _exact(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)
