"""Waits of the host for a GPU, turned into errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def raise_on_synchronisation(device: torch.device) -> Iterator[None]:
    """A context in which a wait of the host for the device is an error, if torch detects it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
