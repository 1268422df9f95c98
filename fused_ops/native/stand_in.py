"""Torch's meta device in the place of a CPU or of a card: ops make and keep the tensors that they would there, and
compute nothing. So the bytes of a layer are measured from the layer itself, on any machine and in no time.

A kernel declares what it makes and saves by the code around its call: the tensors that the code allocates and hands to
autograd are those of the real device, and the library that stands in for the kernels does nothing when it is called.

What a kernel reads, writes and multiplies is in the tensors of its call too. A `Witness` is told of each call, and so
counts the work of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fused_ops.native.binding import Argument, Library

META = "meta"
_KIND: ContextVar[str] = ContextVar("kind_of_meta", default=META)


class AttentionWork(NamedTuple):
    """What a body of attention does in one kernel.

    planes    heads of all samples
    length    of the sequences
    size      width of a head
    products  how often queries and keys, or two tensors of their shapes, are multiplied
    seen      the share of the pairs of a query and a key that are computed
    dtype     of the factors
    moved     bytes that are read and written, where no call of a kernel says so
    """

    planes: int
    length: int
    size: int
    products: int
    seen: float
    dtype: torch.dtype
    moved: int = 0


class Witness(Protocol):
    """Is told what kernels on the meta device would do."""

    def called(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel of this name is called with these tensors."""
        ...

    def attended(self, work: AttentionWork) -> None:
        """A body of attention computes in one kernel."""
        ...


_WITNESS: ContextVar[Witness | None] = ContextVar("witness_of_meta", default=None)


@contextmanager
def witnessed_by(witness: Witness) -> Iterator[None]:
    """Within the block this witness is told, and loops over equal blocks run whole (`witness`)."""
    token = _WITNESS.set(witness)
    try:
        yield
    finally:
        _WITNESS.reset(token)


def witness() -> Witness | None:
    """The witness; None where nobody counts. Without one, code may leave out what takes no more memory."""
    return _WITNESS.get()


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
        """Computes nothing: a tensor on the meta device has no numbers."""
        told = witness()
        if told is not None:
            told.called(name, [argument for argument in arguments if isinstance(argument, Tensor)])


_STAND_INS: Mapping[str, Library] = MappingProxyType({"cpu": _StandIn(False), "cuda": _StandIn(True)})


def stand_in() -> Library | None:
    """What stands in for the kernels on the meta device; None outside `standing_for`."""
    return _STAND_INS.get(_KIND.get())
