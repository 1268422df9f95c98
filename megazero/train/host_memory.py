"""The host's heap of a run. Memory that a step frees is kept for the next one, because new pages are slow.

A heap has holes: a tensor that is freed between two that live leaves room that a larger tensor cannot use. glibc's
aligned allocations do not even use the hole of a tensor of their own size. Where parameters come and go for every unit,
between activations that stay, the holes of a step were half as much again as its tensors. So a run that keeps something
on disks, because memory is short, returns its free memory as soon as it holds more than its account says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megazero.config.derive import uses_disks
from megazero.config.schema import Run
from megazero.mpu.grid import ProcessGrid
from megazero.plan.leaving_disks import writes_activations
from megazero.plan.tier_peaks import run_peaks
from megazero.system import device as devices
from megazero.system.allocator import return_large
from megazero.system.host_memory import is_short

GROWTH = 1.25
"""Free memory of the host's allocator is returned to the system when a rank's resident set exceeds its size after the
second step by this factor, or when the host's memory is short.
"""


class HostMemory:
    """Keeps the host's heap from growing without limit. Made before anything of the model is allocated.

    account: most bytes of the model state and of a step in this process, where free memory is returned within steps
    too; None: between steps only
    """

    def __init__(self, device: torch.device, account: int | None = None) -> None:
        self._device, self._usual = device, 0
        self.computed: Callable[[], None] | None = None if account is None else self._keep_account
        """What follows each computation of a step."""
        if account is not None:
            devices.return_free_memory(self._device)  # or what was freed before would count as room
            self._most = devices.memory_bytes(self._device) + account

    def limit(self, steps: int) -> None:
        """Return free memory if too much is held, after this number of steps of the process."""
        if self._device.type != "cpu":
            return
        held = devices.memory_bytes(self._device)
        if steps <= 2:
            self._usual = held
        elif held > GROWTH * self._usual or is_short():
            devices.return_free_memory(self._device)

    def _keep_account(self) -> None:
        """Return free memory if more is held than the account. What libraries compile and keep counts as held: at the
        peak of a step this may be after every computation, a few milliseconds each.
        """
        if devices.memory_bytes(self._device) > self._most:
            devices.return_free_memory(self._device)


def host_memory_of(run: Run, grid: ProcessGrid) -> HostMemory:
    """That of a run on this rank, before anything is allocated. On a CPU with something on disks the account is that of
    both tiers, which are one memory.
    """
    if grid.device.type != "cpu" or not (uses_disks(run) or writes_activations(run)):
        return HostMemory(grid.device)
    if uses_disks(run):
        return_large()
    peaks = run_peaks(run, grid.axes, grid.device.type).of(grid.at.pp)
    return HostMemory(grid.device, peaks.total_bytes)
