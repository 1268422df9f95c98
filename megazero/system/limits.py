"""Limits of a process by its Linux control groups, which containers, batch systems or systemd set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""The root of the control groups; in a container, the container's own group. In version 1 each controller has a folder
of its name there.
"""
OWN = Path("/proc/self/cgroup")


def limits(name: str) -> Iterator[Path]:
    """The file of this name ("memory.max") in the process's own group and in each group above it, as far as they exist.

    All of them limit the process.
    """
    yield from _files(ROOT, _own_group(""), name)


def older_limits(controller: str, name: str) -> Iterator[Path]:
    """The same of version 1 ("memory", "memory.limit_in_bytes"): there a process has a group for each controller."""
    yield from _files(ROOT / controller, _own_group(controller), name)


def _own_group(controller: str) -> Path | None:
    """The process's group below the root; "" is version 2. None if it has none.

    A line of /proc/self/cgroup is a number, controllers with commas, and a path.
    """
    try:
        lines = [line.split(":", 2) for line in OWN.read_text(errors="surrogateescape").splitlines()]
    except OSError:
        lines = []
    found = (path for _, controllers, path in lines if controller in controllers.split(","))
    own = next((Path(path.lstrip("/")) for path in found), None)
    if own is not None and ".." in own.parts:  # the group is outside the part of the tree that is mounted here
        return Path()
    return own


def _files(root: Path, own: Path | None, name: str) -> Iterator[Path]:
    own = own or Path()
    for folder in (own, *own.parents):
        if (file := root / folder / name).is_file():
            yield file
