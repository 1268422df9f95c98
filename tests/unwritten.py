"""Memory that nobody has written holds NaN: what `torch.empty` returns, what a storage has grown by, what is freed, and
spare buffers.

Otherwise such memory mostly holds zeros or old numbers, and what reads it by mistake is wrong now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.zero.storage import BufferPool


def _spoil(storage: torch.UntypedStorage) -> None:
    """Set all bits: NaN in every floating dtype, -1 in integers."""
    if storage.device.type == "cpu" and storage.nbytes():
        torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0xFF)


def _spoiled(tensor: Tensor) -> Tensor:
    _spoil(tensor.untyped_storage())
    return tensor


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Until the end of this context, in this process. Kernels' own scratch memory is left out."""
    resize, give = torch.UntypedStorage.resize_, BufferPool.give

    def making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: _spoiled(make(*args, **kwargs))

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if not nbytes:
            _spoil(storage)  # a kernel that has kept the address reads NaN
        had = storage.nbytes()
        resize(storage, nbytes)
        if not had:
            _spoil(storage)
        return storage

    def given(pool: BufferPool, buffer: Tensor) -> None:
        give(pool, _spoiled(buffer))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(BufferPool, "give", given)
        patch.setattr(Tensor, "new_empty", making(Tensor.new_empty))
        patch.setattr(torch, "empty_like", making(torch.empty_like))
        patch.setattr(torch, "empty", making(torch.empty))
        yield
