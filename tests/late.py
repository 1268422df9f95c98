"""Collectives whose results come as late as possible: until `wait` a result is NaN, and neither input nor output may be
changed.

With real collectives, a missing `wait` shows only by chance, and hardly ever on tiny tensors. Here it always shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import Group


def _until_wait(output: Tensor, result: Tensor, sent: Tensor) -> CommunicationHandle:
    """Copy `result` to `output` at `wait`, and assert that neither `sent` nor `output` was changed before."""
    result = result.clone()
    if output.is_floating_point():
        output.fill_(math.nan)
    kept, poisoned = sent.clone(), output.clone()

    def arrive() -> None:
        assert torch.equal(sent.nan_to_num(), kept.nan_to_num()), "what travels was written to before its wait"
        assert torch.equal(output.nan_to_num(), poisoned.nan_to_num()), "a result was written to before its wait"
        output.copy_(result.view(output.shape))

    return CommunicationHandle(after=arrive)


@contextmanager
def late_collectives() -> Iterator[list[int]]:
    """Replace the collectives in this process, for code that calls them as `collectives.NAME`.

    The list gets an element for each call.
    """
    reduce, scatter, gather = collectives.all_reduce, collectives.reduce_scatter, collectives.all_gather
    exchange = collectives.all_to_all
    count: list[int] = []

    def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> CommunicationHandle:
        result = tensor.detach().clone()
        reduce(result, group, op).wait()
        count.append(1)
        return _until_wait(tensor.detach(), result, tensor.detach())

    def reduce_scatter(output: Tensor, whole: Tensor, group: Group) -> CommunicationHandle:
        result = torch.empty_like(output)
        scatter(result, whole.clone(), group).wait()
        count.append(1)
        return _until_wait(output, result, whole)

    def all_gather(output: Tensor, piece: Tensor, group: Group) -> CommunicationHandle:
        result = torch.empty_like(output)
        gather(result, piece.clone(), group).wait()
        count.append(1)
        return _until_wait(output, result, piece)

    def all_to_all(output: Tensor, source: Tensor, group: Group) -> CommunicationHandle:
        result = torch.empty_like(output)
        exchange(result, source.clone(), group).wait()
        count.append(1)
        return _until_wait(output, result, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_reduce", all_reduce)
        patch.setattr(collectives, "reduce_scatter", reduce_scatter)
        patch.setattr(collectives, "all_gather", all_gather)
        patch.setattr(collectives, "all_to_all", all_to_all)
        yield count
