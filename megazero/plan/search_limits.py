"""The budgets of a search for a placement (`plan.placement`), and what is said where nothing keeps to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.placement import as_flags
from megazero.plan.placed_step import PlacedStep


@dataclass(frozen=True)
class SearchLimits:
    """Most bytes of a rank; None: no limit.

    device     on its device, in a step
    host       in host memory, of what has left the device
    disk       of its swap files
    workspace  of the device's bytes those that matrix products take for themselves, and no plan has
    memory     of the host's memory, or of the budget for all of it
    is_one     whether the device's memory is the host's
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    workspace: int = 0
    memory: int | None = None
    is_one: bool = False

    @property
    def tensors(self) -> int | None:
        """Most bytes of tensors on the device."""
        return None if self.device is None else max(0, self.device - self.workspace)

    def hold(self, step: PlacedStep) -> bool:
        """Whether the step keeps to all of them."""
        host = _within(step.host, self.host) and _within(self.of_memory(step), self.memory)
        return self.hold_device(step) and host and _within(step.disk, self.disk)

    def of_memory(self, step: PlacedStep) -> int:
        """Bytes of the host's memory that a rank takes."""
        return step.host + (step.device.nbytes + self.workspace) * self.is_one

    def excess(self, step: PlacedStep) -> tuple[int, ...]:
        """Bytes above each of them, in the order in which a search looks at them."""
        of_device, of_memory = (step.device.nbytes, self.tensors), (self.of_memory(step), self.memory)
        pairs = of_device, (step.host, self.host), of_memory, (step.disk, self.disk)
        return tuple(0 if limit is None else max(0, nbytes - limit) for nbytes, limit in pairs)

    def hold_device(self, step: PlacedStep) -> bool:
        return _within(step.device.nbytes, self.tensors)


def _within(nbytes: int, limit: int | None) -> bool:
    return limit is None or nbytes <= limit


def refusal(over: Sequence[PlacedStep], limits: SearchLimits, disks: bool) -> str:
    """Why nothing keeps to the budgets, and what would help. over: what was tried. disks: whether with disks."""
    more = "" if disks else ", --nvme-path DIR for state on disks"
    fits = [step for step in over if limits.hold_device(step)]
    if not fits:
        least = min(over, key=lambda step: step.device.nbytes)
        own = f", {limits.workspace:,} of them for matrix products" * (limits.workspace > 0)
        takes = least.device.nbytes + limits.workspace
        return (
            f"--device-memory-budget {limits.device:,}: no placement keeps to it; the least that a rank takes is "
            f"{takes:,} bytes{own}, with {as_flags(dict(least.settings)) or 'all on the device'}, at "
            f"{least.device.instruction} on stage {least.device.stage}; nearest: that budget, a smaller "
            "--micro-batch-size, or --recompute-granularity full"
        )
    hosted = [step for step in fits if _within(step.host, limits.host)]
    if limits.host is not None and not hosted:
        least = min(fits, key=lambda step: step.host)
        return (
            f"--host-memory-budget {limits.host:,}: of the placements that keep to the device's budget the one "
            f"with least in host memory takes {least.host:,} bytes there, with {as_flags(dict(least.settings))}; "
            f"nearest: that budget, a smaller --nvme-buffer-bytes{more}"
        )
    least = min(hosted, key=limits.of_memory)
    if not _within(limits.of_memory(least), limits.memory):
        told, whole = as_flags(dict(least.settings)) or "all on the device", f"{limits.of_memory(least):,}"
        if limits.is_one and limits.memory == limits.device:
            return (
                f"--device-memory-budget {limits.memory:,}: it is of all memory of a rank on a CPU, and the placement "
                f"that takes least takes {whole} bytes, with {told}; nearest: that budget, a smaller "
                f"--micro-batch-size{more}"
            )
        return (
            f"--placement auto: this host's memory has {limits.memory:,} bytes for a rank, and the placement that "
            f"takes least of it takes {whole}, with {told}; nearest: fewer ranks on this host, a smaller "
            f"--micro-batch-size{more}"
        )
    least = min((step for step in hosted if _within(limits.of_memory(step), limits.memory)), key=lambda step: step.disk)
    return (
        f"--nvme-path: the swap files of a rank have {limits.disk or 0:,} bytes of room, and with "
        f"{as_flags(dict(least.settings))} they take {least.disk:,}; nearest: a folder more, on another disk"
    )
