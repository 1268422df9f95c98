"""A group whose other ranks are not there, for layers on the meta device: its collectives leave results as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megazero.mpu.exchange import Exchange, SharedMemoryWork
from megazero.mpu.grid import Group


class _Done(SharedMemoryWork):
    """A collective of which nothing is left to do."""

    def __init__(self) -> None:
        """There is no exchange to advance."""

    def wait(self) -> None:
        """Returns at once."""


class _Nobody(Exchange):
    """Takes every tensor, and does nothing with any."""

    def __init__(self) -> None:
        """There is no shared memory."""

    def takes(self, tensor: Tensor) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, op: str) -> SharedMemoryWork:
        return _Done()

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> SharedMemoryWork:
        return _Done()

    def all_gather(self, output: Tensor, piece: Tensor) -> SharedMemoryWork:
        return _Done()


class AbsentGroup(Group):
    """A group that no backend has made."""

    is_on_host = True  # so that the exchange is asked for every collective


def absent_group(size: int) -> Group:
    """Rank 0 of a group of this size, without the others."""
    handle: Any = object()
    return AbsentGroup(tuple(range(size)), 0, handle if size > 1 else None, _Nobody())
