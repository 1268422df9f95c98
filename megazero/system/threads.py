"""The number of threads with which a rank computes: the host's cores divided among its ranks.

torchrun sets OMP_NUM_THREADS=1 for all ranks if the user has not set it, which leaves most of a host idle. The
environment of the torchrun process itself shows whether the user has set it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megazero.system.limits import limits

VARIABLE = "OMP_NUM_THREADS"
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable in the environment of ranks and their children, which torchrun's own environment does not have."""


def threads_per_rank(ranks: int) -> int:
    """Threads of each of `ranks` ranks on this host: at least 1, and together no more than there are cores.

    The cores are those that the launcher may use. A rank that is bound to some cores gets no more threads than these.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        all_ranks = os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        all_ranks = own
    return max(1, min(cores(own), _quota(cores(own | all_ranks)) // ranks))


def cores(processors: set[int]) -> int:
    """Number of physical cores of these processors. Hardware threads of one core share its arithmetic units."""
    return len({_siblings(number) for number in processors})


def threads_set_by_user() -> int | None:
    """The user's OMP_NUM_THREADS; None if it is not set, or if torchrun has set it to 1.

    Where the launcher's environment cannot be read (outside Linux), a 1 counts as the user's.
    """
    value = os.environ.get(VARIABLE, "").partition(",")[0]  # a list is one number for each level of nesting
    if not value.isdecimal() or int(value) < 1:
        return None
    return None if value == "1" and BY_TORCHRUN in os.environ and _set_by_torchrun(os.getppid()) else int(value)


def _set_by_torchrun(process: int) -> bool:
    """Whether torchrun was started without the variable. It is the nearest ancestor that is no rank.

    process: the process id from which to search upwards.
    """
    while process > 1:
        try:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{process}/stat").read_text(errors="surrogateescape")
        except OSError:
            return False
        names = {word.partition(b"=")[0].decode(errors="replace") for word in words}
        if BY_TORCHRUN not in names:
            return VARIABLE not in names
        process = int(status.rpartition(")")[2].split()[1])
    return False


def _siblings(processor: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(processor)


def _quota(count: int) -> int:
    """The least of `count` and the CPU limits of the control groups ("cpu.max": microseconds per period), in cores."""
    for file in limits("cpu.max"):
        with suppress(OSError, ValueError):  # no limit ("max")
            limit, period = file.read_text().split()
            count = max(1, min(count, int(limit) // int(period)))
    return count
