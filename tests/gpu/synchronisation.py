"""Waits of the host for a card, made an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def raise_on_synchronisation(device: torch.device) -> Iterator[None]:
    """Within the block, what makes the host wait for the device is an error, as far as torch knows of it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
