"""Settings of the memory allocators. Programs apply them before they import anything large.

Activations are large tensors that live for less than a step. By default glibc gets fresh pages from the system for each
of them and returns the pages when it is freed. Zeroing and mapping pages then takes up to a third of a step on a CPU.
glibc reads its settings when a process starts, so the process executes itself once more with them. A process that is
there for one run also takes the memory of a CPU's tensors from glibc in another way than torch does
(`fused_ops/csrc/torch/host_tensors.cpp`): memory that stays is of use where the next tensor fits into it.

torch's CUDA allocator by default takes segments of fixed sizes, which fragment: a tensor that does not fit into the
rest of a segment needs another one. Expandable segments do not fragment. (The pool of a CUDA graph has them too, and
NCCL must not register it, see `launch`.) torch reads this setting at its first allocation.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # large pages where the system leaves the choice to the program
    "glibc.malloc.mmap_threshold": 1 << 32,  # no tensor gets pages of its own
    "glibc.malloc.trim_threshold": 1 << 34,  # freed memory stays for the next tensor
    "glibc.malloc.top_pad": 1 << 26,  # the heap grows in such steps
}
LARGE = 1 << 25
"""Bytes of a tensor that gets pages of its own after `return_large`: glibc takes no higher bound at run time."""
_MMAP_THRESHOLD = -3
"""mallopt's number of glibc.malloc.mmap_threshold."""
CUDA_SETTINGS = "expandable_segments:True"
CUDA_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""The variable of torch's allocator and its older name, which torch reads if the first is not set."""
VARIABLE, CHOICE = "GLIBC_TUNABLES", "MEGAZERO_ALLOCATOR"


def settings() -> str:
    """The settings as glibc reads them from its variable."""
    return ":".join(f"{name}={value}" for name, value in TUNABLES.items())


def restart_with_settings() -> None:
    """Execute this command again with glibc's settings, in the same process; set torch's setting.

    It returns without a restart if the settings are there already, if the C library is not glibc, or if the user has
    set `GLIBC_TUNABLES` for malloc or `MEGAZERO_ALLOCATOR=system`. A setting of torch's by the user is not changed.
    Must be called before files are opened or threads are started.
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


def return_large() -> None:
    """From now on have tensors of `LARGE` bytes or more get pages of their own, which return to the system when they
    are freed. For a run whose state is on disks because memory is short: freed memory that is kept for other sizes
    would be a quarter of what it takes. Does nothing where glibc has other settings than ours.
    """
    if are_ours():
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE)


def describe(device: str = "cpu", *, returns_large: bool = False) -> str:
    """The settings of the allocator of the device's memory, in words for the banner. returns_large: of a run that calls
    `return_large`.
    """
    if device == "cuda":
        given = next((os.environ[name] for name in CUDA_VARIABLES if name in os.environ), None)
        return (
            "torch's own settings"
            if given is None
            else "segments that grow"
            if given == CUDA_SETTINGS
            else f"torch with {given}"
        )
    if not _given():
        return "the system's own settings"
    if not are_ours():
        return f"glibc with {VARIABLE} as given"
    kept = f"freed memory below {LARGE >> 20} MiB" if returns_large else "freed memory"
    return f"glibc keeps {kept}, large pages where allowed"


def _given() -> dict[str, str]:
    """glibc's settings of this process, by name."""
    parts = os.environ.get(VARIABLE, "").split(":")
    return dict(part.split("=", 1) for part in parts if part.startswith("glibc.malloc.") and "=" in part)


def are_ours() -> bool:
    """Whether glibc has the settings of this program in this process."""
    found = _given()
    return all(found.get(name) == str(value) for name, value in TUNABLES.items())
