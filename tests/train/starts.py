"""What a start says of a run before anything is made."""

from __future__ import annotations

from megazero.config.schema import Run
from megazero.train.checked import asked_start, check_start
from megazero.train.resolve import Facts, ResolvedRun, resolve


def problems_at_start(run: Run, world_size: int = 1) -> tuple[str, ...]:
    """Everything that is wrong apart from the machine, if all ranks are on this host."""
    return tuple(check_start(asked_start(run, world_size, range(world_size))))


def resolved_for(run: Run, world_size: int = 1, kind: str = "cpu", *, tries_kernels: bool = True) -> ResolvedRun:
    """The run as this many ranks resolve it by arithmetic, without files."""
    return resolve(run, Facts(world_size, kind, device=kind, tries_kernels=tries_kernels))
