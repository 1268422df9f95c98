"""A group whose other ranks are not there. For layers on the meta device its collectives leave results as they are, and
can be counted; for layers that compute, the others are taken to have the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
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


Sent = Callable[[str, int], None]
"""Is told the name of each collective and its bytes, by the convention of `Group.traffic`."""


class _Nobody(Exchange):
    """Takes every tensor, and does nothing with any but tell of it."""

    def __init__(self, sent: Sent) -> None:
        """There is no shared memory."""
        self._sent = sent

    def takes(self, tensor: Tensor) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, op: str) -> SharedMemoryWork:
        self._sent("all_reduce", 2 * tensor.nbytes)
        return _Done()

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> SharedMemoryWork:
        self._sent("reduce_scatter", whole.nbytes)
        return _Done()

    def all_gather(self, output: Tensor, piece: Tensor) -> SharedMemoryWork:
        self._sent("all_gather", output.nbytes)
        return _Done()


class _Alike(Exchange):
    """Takes every tensor. The others have the numbers of this rank, and sums are means, so that no number grows."""

    def __init__(self) -> None:
        """There is no shared memory."""

    def takes(self, tensor: Tensor) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, op: str) -> SharedMemoryWork:
        return _Done()

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> SharedMemoryWork:
        output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return _Done()

    def all_gather(self, output: Tensor, piece: Tensor) -> SharedMemoryWork:
        output.view(-1, piece.numel()).copy_(piece.view(1, -1))
        return _Done()


class AbsentGroup(Group):
    """A group that no backend has made."""

    is_on_host = True  # so that the exchange is asked for every collective


def absent_group(size: int, sent: Sent = lambda name, nbytes: None) -> Group:
    """Rank 0 of a group of this size, without the others."""
    return _first_of(size, _Nobody(sent))


def alike_group(size: int) -> Group:
    """Rank 0 of a group of this size, whose others have the same numbers: for layers that compute."""
    return _first_of(size, _Alike())


def _first_of(size: int, exchange: Exchange) -> Group:
    handle: Any = object()
    return AbsentGroup(tuple(range(size)), 0, handle if size > 1 else None, exchange)
