"""A command whose memory the kernel limits, by a control group of its own, and what it used of memory and disk.

Needs Linux and the right to make control groups (root, on most machines), of version 1 or 2.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from threading import Event, Thread

ROOT = Path("/sys/fs/cgroup")
EVERY = 0.1
"""Seconds between two looks at the resident set and the files."""


@dataclass(frozen=True)
class Version:
    """Where a version of control groups has its folder, the limit, and what of memory.stat is no page cache."""

    folder: Path
    limit: str
    resident: tuple[str, ...]
    killed: Callable[[Path], int]


def _killed_newer(group: Path) -> int:
    words = (group / "memory.events").read_text().split()
    return int(words[words.index("oom_kill") + 1])


def _killed_older(group: Path) -> int:
    words = (group / "memory.oom_control").read_text().split()
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


NEWER = Version(ROOT, "memory.max", ("anon", "shmem"), _killed_newer)
OLDER = Version(ROOT / "memory", "memory.limit_in_bytes", ("total_rss", "total_shmem"), _killed_older)


@dataclass(frozen=True)
class Held:
    """What a command did within its limit.

    resident  the most bytes of memory that its processes held together, shared ones included, page cache not
    disk      the most bytes that the files of its folder took on disk
    killed    processes that the kernel killed for memory
    """

    status: int
    text: str
    seconds: float
    resident: int
    disk: int
    killed: int


def run_held(command: Sequence[str], limit: int, folder: Path, files: Path) -> Held:
    """Run a command with all its children in `limit` bytes of memory, in this folder; its output comes back as text.

    files: the folder that it writes into. Raises OSError where a control group cannot be made.
    """
    version = NEWER if (ROOT / "cgroup.controllers").exists() else OLDER
    group = version.folder / f"megazero-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / version.limit).write_text(str(limit))
        done, most = Event(), _Most()
        watcher = Thread(target=_watch, args=(group / "memory.stat", version.resident, files, done, most))
        watcher.start()
        began = time.perf_counter()
        # The shell enters the group before it becomes the command, so that nothing of it is outside.
        entered = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        ended = subprocess.run(
            entered, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
        return Held(ended.returncode, ended.stdout, seconds, most.resident, most.disk, version.killed(group))
    finally:
        group.rmdir()


@dataclass
class _Most:
    resident: int = 0
    disk: int = 0


def _watch(stat: Path, names: tuple[str, ...], files: Path, done: Event, most: _Most) -> None:
    while not done.wait(EVERY):
        found = dict(line.split() for line in stat.read_text().splitlines())
        most.resident = max(most.resident, sum(int(found.get(name, 0)) for name in names))
        most.disk = max(most.disk, disk_bytes(files))


def disk_bytes(folder: Path) -> int:
    """Bytes that all files under a folder take on disk. Files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_blocks * 512 if S_ISREG(found.st_mode) else 0
    return total
