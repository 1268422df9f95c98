"""What Linux limits a process to: its control groups (version 2), which a container, a batch system
or systemd makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""In a container this folder is the container's own group."""
OWN = Path("/proc/self/cgroup")


def limits(name: str) -> Iterator[Path]:
    """This file ("memory.max") of every group that the process is in and that has one, its own group first.

    Each of them limits it.
    """
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    own = Path(next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), ""))
    if ".." in own.parts:  # the group lies outside what is mounted here
        own = Path()
    for folder in (own, *own.parents):
        if (file := ROOT / folder / name).is_file():
            yield file
