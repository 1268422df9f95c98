"""The threads of a rank that work on its model state beside the computation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megazero.system.copy_thread import CopyThread


@dataclass(frozen=True)
class HostLanes:
    """Copies in both directions, and updates in host memory: each lane works off what it is given in order."""

    to_host: CopyThread
    to_device: CopyThread
    updates: ThreadPoolExecutor

    @classmethod
    def of(cls, device: torch.device) -> HostLanes:
        """Lanes for this device. A thread starts with its first work."""
        updates = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-updates")
        return cls(CopyThread(device, "to-host"), CopyThread(device, "to-device"), updates)

    def close(self) -> None:
        """End the threads; what has not begun is cancelled."""
        self.to_host.close()
        self.to_device.close()
        self.updates.shutdown(cancel_futures=True)
