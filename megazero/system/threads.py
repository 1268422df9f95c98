"""How many threads a rank computes with: the host's cores, divided among its ranks.

torchrun sets OMP_NUM_THREADS=1 for all ranks where nobody has set it, which leaves most of a host idle. What it was
started with itself says whether somebody has.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megazero.system.limits import limits

VARIABLE = "OMP_NUM_THREADS"
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks and of what they start, and not in torchrun's own."""


def share(ranks: int) -> int:
    """Threads of each of so many ranks on this host: no core is used twice, and no rank goes without.

    Counted are the cores that the launcher may use, and for a rank that is bound to some of them no more than those.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        all_ranks = os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        all_ranks = own
    return max(1, min(cores(own), _quota(cores(own | all_ranks)) // ranks))


def cores(processors: set[int]) -> int:
    """Cores behind these processors: two of them may be one core's threads, which share what computes."""
    return len({_siblings(number) for number in processors})


def given() -> int | None:
    """What the user has set the variable to; None where it is not set, or is torchrun's 1.

    Where the launcher's environment cannot be read (outside Linux), a 1 is taken for the user's.
    """
    value = os.environ.get(VARIABLE, "").partition(",")[0]  # a list is one number for each level of nesting
    if not value.isdecimal() or int(value) < 1:
        return None
    return None if value == "1" and BY_TORCHRUN in os.environ and _set_by_torchrun(os.getppid()) else int(value)


def _set_by_torchrun(process: int) -> bool:
    """Whether torchrun, the nearest ancestor that is no rank, was started without the variable.

    `process`: where to begin.
    """
    while process > 1:
        try:
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{process}/stat").read_text()
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
    """So many cores, or those that a control group's share of the time comes to: microseconds of each period of so many
    microseconds.
    """
    for file in limits("cpu.max"):
        with suppress(OSError, ValueError):  # no limit ("max")
            limit, period = file.read_text().split()
            count = max(1, min(count, int(limit) // int(period)))
    return count
