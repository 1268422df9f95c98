"""The host's heap between steps. Memory that a step frees is kept for the next one, because new pages are slow."""

from __future__ import annotations

import torch

from megazero.system import device as devices
from megazero.system.host_memory import is_short

GROWTH = 1.25
"""Free memory of the host's allocator is returned to the system when a rank's resident set exceeds its size after the
second step by this factor, or when the host's memory is short.
"""


class HostMemory:
    """Keeps the host's heap from growing without limit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._usual = 0

    def limit(self, steps: int) -> None:
        """Return free memory if too much is held, after this number of steps of the process."""
        if self.device.type != "cpu":
            return
        held = devices.memory_bytes(self.device)
        if steps <= 2:
            self._usual = held
        elif held > GROWTH * self._usual or is_short():
            devices.return_free_memory(self.device)
