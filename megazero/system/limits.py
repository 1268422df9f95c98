"""Limits of a process by its Linux control groups (version 2), which containers, batch systems or systemd set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""The root of the control groups; in a container, the container's own group."""
OWN = Path("/proc/self/cgroup")


def limits(name: str) -> Iterator[Path]:
    """The file of this name ("memory.max") in the process's own group and in each group above it, as far as they exist.

    All of them limit the process.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    own = Path(next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), ""))
    if ".." in own.parts:  # the group is outside the part of the tree that is mounted here
        own = Path()
    for folder in (own, *own.parents):
        if (file := ROOT / folder / name).is_file():
            yield file
