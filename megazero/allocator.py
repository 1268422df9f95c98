"""Settings of the host's memory allocator, for programs to take before they import anything large.

Activations are large tensors that live for less than a step. glibc by default gives each of them fresh pages from the system and
takes the pages back at the end of its life; zeroing and mapping those pages cost up to a third of a step on a CPU. It reads
its settings when a process starts, so the process starts itself once more with them.
"""

from __future__ import annotations

import os
import platform
import sys

TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # large pages where the system leaves the choice to the program
    "glibc.malloc.mmap_threshold": 1 << 32,  # no tensor gets pages of its own
    "glibc.malloc.trim_threshold": 1 << 34,  # freed memory stays for the next tensor
    "glibc.malloc.top_pad": 1 << 26,  # the heap grows in such steps
}
VARIABLE, CHOICE = "GLIBC_TUNABLES", "MEGAZERO_ALLOCATOR"


def settings() -> str:
    """The settings as glibc reads them from its variable."""
    return ":".join(f"{name}={value}" for name, value in TUNABLES.items())


def restart_with_settings() -> None:
    """Start this very command again with the settings, in the same process; returns where that has been done or cannot be.

    It cannot where the C library is not glibc, and is not where the user set `GLIBC_TUNABLES` for malloc or
    `MEGAZERO_ALLOCATOR=system`. To be called before anything is opened or started.
    """
    given = os.environ.get(VARIABLE, "")
    if os.environ.get(CHOICE) == "system" or "glibc.malloc." in given or platform.libc_ver()[0] != "glibc":
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: f"{given}:{settings()}".lstrip(":")})


def describe() -> str:
    """What the allocator was set to, in words for the banner."""
    found = dict(part.split("=", 1) for part in os.environ.get(VARIABLE, "").split(":") if part.startswith("glibc.malloc.") and "=" in part)
    if not found:
        return "the system's own settings"
    ours = all(found.get(name) == str(value) for name, value in TUNABLES.items())
    return "glibc keeps freed memory, large pages where allowed" if ours else f"glibc with {VARIABLE} as given"
