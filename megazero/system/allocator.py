"""Settings of the memory allocators, for programs to take before they import anything large.

Activations are large tensors that live for less than a step. glibc by default gives each of them fresh pages from the
system and takes the pages back at the end of its life; zeroing and mapping those pages cost up to a third of a step on
a CPU. It reads its settings when a process starts, so the process starts itself once more with them.

torch's allocator of CUDA memory by default takes segments of fixed sizes, and what does not fit into the rest of one
needs another. A segment that grows leaves no such rests. (A CUDA graph's pool has segments of its own, NCCL must not
register them, see `launch`; and ranks that share a card share no segments.) torch reads this setting when it first
allocates.
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
CUDA_SETTINGS = "expandable_segments:True"
CUDA_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The name of today and the one of before, which torch reads where the first is not set."""
VARIABLE, CHOICE = "GLIBC_TUNABLES", "MEGAZERO_ALLOCATOR"


def settings() -> str:
    """The settings as glibc reads them from its variable."""
    return ":".join(f"{name}={value}" for name, value in TUNABLES.items())


def restart_with_settings() -> None:
    """Start this very command again with the settings, in the same process; returns where that has been done or cannot
    be.

    It cannot where the C library is not glibc, and is not where the user set `GLIBC_TUNABLES` for malloc or
    `MEGAZERO_ALLOCATOR=system`. To be called before anything is opened or started. torch's setting needs no new start;
    it is left alone where the user has set one.
    """
    if os.environ.get(CHOICE) == "system":
        return
    if not any(name in os.environ for name in CUDA_VARIABLES):
        os.environ[CUDA_VARIABLES[0]] = CUDA_SETTINGS
    given = os.environ.get(VARIABLE, "")
    if "glibc.malloc." in given or platform.libc_ver()[0] != "glibc":
        return
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, VARIABLE: f"{given}:{settings()}".lstrip(":")},
    )


def describe(device: str = "cpu") -> str:
    """What the allocator of the device's memory was set to, in words for the banner."""
    if device == "cuda":
        given = next((os.environ[name] for name in CUDA_VARIABLES if name in os.environ), None)
        return (
            "torch's own settings"
            if given is None
            else "segments that grow"
            if given == CUDA_SETTINGS
            else f"torch with {given}"
        )
    found = dict(
        part.split("=", 1)
        for part in os.environ.get(VARIABLE, "").split(":")
        if part.startswith("glibc.malloc.") and "=" in part
    )
    if not found:
        return "the system's own settings"
    ours = all(found.get(name) == str(value) for name, value in TUNABLES.items())
    return "glibc keeps freed memory, large pages where allowed" if ours else f"glibc with {VARIABLE} as given"
