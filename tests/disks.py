"""A disk that can really be full: a small file system in memory, which root may mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A context with a file system of `size` bytes at `folder`. Skips the test if this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("a full disk: there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a full disk: a tmpfs cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """Make a file system of `small_disk` read-only (`ro`), or writable again (`rw`)."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the file system of `folder` with one file, and return its path. Remove it to free the space."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
