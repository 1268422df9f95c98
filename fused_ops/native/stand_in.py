"""Torch's meta device in the place of a CPU or of a card: ops make and keep the tensors that they would there, and
compute nothing. So the bytes of a layer are measured from the layer itself, on any machine and in no time.

A kernel declares what it makes and saves by the code around its call: the tensors that the code allocates and hands to
autograd are those of the real device, and the library that stands in for the kernels does nothing when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import torch

from fused_ops.native.binding import Argument, Library

META = "meta"
_KIND: ContextVar[str] = ContextVar("kind_of_meta", default=META)


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Within the block, tensors on the meta device take the ways of tensors on this kind of device: cpu or cuda."""
    token = _KIND.set(kind)
    try:
        yield
    finally:
        _KIND.reset(token)


def kind_of(device: torch.device) -> str:
    """The kind of a device: cpu, cuda, or another; of meta the kind for which it stands, else meta."""
    return _KIND.get() if device.type == META else device.type


class _StandIn(Library):
    """The kernels of a kind of device on the meta device, where nothing is loaded and nothing runs."""

    def __init__(self, on_device: bool) -> None:
        self.level, self.on_device = META, on_device

    def call(self, name: str, *arguments: Argument) -> None:
        """Does nothing: a tensor on the meta device has no numbers."""


_STAND_INS: Mapping[str, Library] = MappingProxyType({"cpu": _StandIn(False), "cuda": _StandIn(True)})


def stand_in() -> Library | None:
    """What stands in for the kernels on the meta device; None outside `standing_for`."""
    return _STAND_INS.get(_KIND.get())
