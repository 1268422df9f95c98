"""The host's memory: how much a process may use, and how much is free. Control groups count as the machine does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megazero.system.limits import limits, older_limits

UNLIMITED = 1 << 60
"""A control group of version 1 without a limit has one that is larger than this."""
KEPT_HOLES = 1 / 16
"""Of what a process uses that has to keep an account of its memory, the part that may be free memory beside it."""


class _Group(NamedTuple):
    """A control group's limit in bytes, what is used of it, and how much of that is page cache."""

    limit: int
    used: int
    cached: int


def machine_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes; None where there is none."""
    try:
        return int(Path("/proc/meminfo").read_text().split(f"{field}:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None


def available_bytes() -> int | None:
    """Bytes that a program can still allocate: the least of machine and control groups; None if it is not known.

    A group's page cache counts as free, since it is given up when memory is asked for.
    """
    left = [machine_bytes("MemAvailable"), *(max(0, group.limit - group.used + group.cached) for group in _groups())]
    return min((number for number in left if number is not None), default=None)


def limit_bytes() -> int | None:
    """Bytes that all processes here can have together, swap space included: the least of machine and control groups.

    None if it is not known.
    """
    total = [machine_bytes("MemTotal"), *(group.limit for group in _groups())]
    least = min((number for number in total if number is not None), default=None)
    return None if least is None else least + (machine_bytes("SwapTotal") or 0)


def is_short() -> bool:
    """Whether less than a quarter of the memory is available. False if it is not known."""
    total, available = limit_bytes(), available_bytes()
    return total is not None and available is not None and 4 * available < total


def _groups() -> Iterator[_Group]:
    """The groups of this process that have a limit."""
    newer = ((file, "memory.current", ("active_file", "inactive_file")) for file in limits("memory.max"))
    older = (
        (file, "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
        for file in older_limits("memory", "memory.limit_in_bytes")
    )
    for file, used, caches in (*newer, *older):
        if (group := _group(file, used, caches)) is not None and group.limit < UNLIMITED:
            yield group


def _group(file: Path, used: str, caches: tuple[str, str]) -> _Group | None:
    """None without a limit: no such file, or "max"."""
    try:
        limit, taken = (int((file.parent / name).read_text()) for name in (file.name, used))
        lines = (line.split() for line in (file.parent / "memory.stat").read_text().splitlines())
        return _Group(limit, taken, sum(int(value) for name, value in lines if name in caches))
    except (OSError, ValueError):
        return None
