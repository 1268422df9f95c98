"""Collectives over a `Group`, without autograd, for any device and backend. Each adds its bytes to `Group.traffic`.

Each returns a `CommunicationHandle`, whose `wait()` makes the result valid (on CUDA: for the current stream). In a
group of one nothing is communicated.

gloo cannot read CUDA tensors, so they are copied through pinned host memory. The launch blocks the host until the copy
to the host is done; the copy back to the device does not block it. NCCL runs on a stream of its own. That stream waits
for the current one at the launch, and the tensors are kept until `wait()`. Ranks of one host exchange host tensors
through shared memory (`mpu.exchange`). The backend carries everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.mpu.exchange import Exchange, SharedMemoryWork
from megazero.mpu.grid import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed the flat collectives; 2.11 has only the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CommunicationHandle:
    """What every collective and every receive returns: `wait()` makes the result valid, and may be called again."""

    def __init__(
        self,
        work: dist.Work | SharedMemoryWork | CommunicationHandle | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._after = work, after

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._after is not None:
            self._after()
        self._work = self._after = None


def _exchange(tensor: Tensor, group: Group) -> Exchange | None:
    return group.exchange if group.exchange is not None and group.exchange.takes(tensor) else None


def _staged(tensor: Tensor, group: Group) -> Tensor:
    """The tensor itself, or a pinned host copy where the backend cannot read the device."""
    if not tensor.is_cuda or not group.is_on_host:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def _unstage(tensor: Tensor, host: Tensor) -> None:
    """Copy back to the device on the current stream. torch keeps the pinned memory until the copy is over."""
    tensor.copy_(host, non_blocking=True)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> CommunicationHandle:
    """Reduce a contiguous tensor of any shape over the group, in place. op: "sum", "max" or "min"."""
    if group.handle is None:
        return CommunicationHandle()
    assert tensor.is_contiguous()
    group.traffic["all_reduce", tensor.dtype] += 2 * tensor.nbytes
    buffer = _staged(tensor, group)
    work: dist.Work | SharedMemoryWork | None
    if exchange := _exchange(buffer, group):
        work = exchange.all_reduce(buffer, op)
    else:
        work = dist.all_reduce(buffer, _OPS[op], group=group.handle, async_op=True)
    return CommunicationHandle(work, None if buffer is tensor else lambda: _unstage(tensor, buffer))


def sums(values: Sequence[Tensor | float], group: Group, device: torch.device) -> list[Tensor]:
    """The sum of each value over the ranks of a group, as 0-dim float64 tensors on the device; one all-reduce.

    The host does not wait for the device: Python numbers become tensors by a fill, not by a copy.
    """
    packed = torch.stack([_float64(value, device) for value in values])
    all_reduce(packed, group).wait()
    return list(packed.unbind())


def _float64(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def all_gather(output: Tensor, piece: Tensor, group: Group) -> CommunicationHandle:
    """Fill `output` (n*k elements) with the `piece` (k elements, any shape) of each of the n ranks, by group index.

    Both are contiguous and of one dtype. `piece` may be a view of this rank's part of `output`.
    """
    if group.handle is None:
        if piece.data_ptr() != output.data_ptr():
            output.view(piece.shape).copy_(piece)
        return CommunicationHandle()
    assert output.is_contiguous() and piece.is_contiguous() and output.numel() == group.size * piece.numel()
    group.traffic["all_gather", output.dtype] += output.nbytes
    source = _staged(piece, group)
    target = output if source is piece else torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    work: dist.Work | SharedMemoryWork | None
    if exchange := _exchange(source, group):
        work = exchange.all_gather(target, source)
    else:  # flat: gloo cannot gather tensors of more than one dimension into one output
        work = _all_gather_flat(target.view(-1), source.view(-1), group=group.handle, async_op=True)
    return CommunicationHandle(work, None if target is output else lambda: _unstage(output, target))


def reduce_scatter(output: Tensor, whole: Tensor, group: Group) -> CommunicationHandle:
    """Sum `whole` (n*k elements) over the n ranks and put this rank's part of the sum into `output` (k elements).

    Both are contiguous and of one dtype. `output` may be a view of this rank's part of `whole`.

    NCCL's own reduce-scatter is used on GPUs, and shared memory within a host. gloo implements a reduce-scatter as an
    all-reduce. With gloo each part therefore goes to its owner by an all-to-all, and the owner sums in order of group
    index: half the bytes, and the same bits in every run.
    """
    if group.handle is None:
        if output.data_ptr() != whole.data_ptr():
            output.copy_(whole.view(output.shape))
        return CommunicationHandle()
    assert output.is_contiguous() and whole.is_contiguous() and whole.numel() == group.size * output.numel()
    group.traffic["reduce_scatter", whole.dtype] += whole.nbytes
    if not group.is_on_host and group.mail is None:
        return CommunicationHandle(_reduce_scatter_flat(output, whole, group=group.handle, async_op=True))
    source = _staged(whole, group)
    if exchange := _exchange(source, group):
        if source is whole:
            return CommunicationHandle(exchange.reduce_scatter(output, source))
        part = source.view(group.size, -1)[group.index]
        return CommunicationHandle(exchange.reduce_scatter(part, source), lambda: _unstage(output.view(-1), part))
    parts = torch.empty(source.shape, dtype=source.dtype, pin_memory=whole.is_cuda).view(group.size, -1)
    work = dist.all_to_all_single(parts.view(-1), source.view(-1), group=group.handle, async_op=True)

    def add_up() -> None:
        total = parts[0]
        for part in parts[1:]:
            total += part
        _unstage(output.view(-1), total)

    return CommunicationHandle(work, add_up)


def all_to_all(output: Tensor, source: Tensor, group: Group) -> CommunicationHandle:
    """Send part i of `source` (n*k elements) to the member with group index i, for each of the n ranks.

    `output` (n*k elements) gets the parts for this rank, by the sender's group index. Both are contiguous, of one
    dtype, and lie apart.
    """
    if group.handle is None:
        output.copy_(source.view(output.shape))
        return CommunicationHandle()
    assert output.is_contiguous() and source.is_contiguous()
    assert output.numel() == source.numel() and source.numel() % group.size == 0
    group.traffic["all_to_all", source.dtype] += source.nbytes
    sent = _staged(source, group)
    target = output if sent is source else torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    work: dist.Work | SharedMemoryWork | None
    if exchange := _exchange(sent, group):
        work = exchange.all_to_all(target, sent)
    else:
        work = dist.all_to_all_single(target.view(-1), sent.view(-1), group=group.handle, async_op=True)
    return CommunicationHandle(work, None if target is output else lambda: _unstage(output, target))


def broadcast(tensor: Tensor, group: Group, source_index: int = 0) -> CommunicationHandle:
    """Copy the contiguous tensor of the member with group index `source_index` to all members, in place."""
    if group.handle is None:
        return CommunicationHandle()
    assert tensor.is_contiguous()
    group.traffic["broadcast", tensor.dtype] += tensor.nbytes
    buffer = _staged(tensor, group)
    work: dist.Work | SharedMemoryWork | None
    if exchange := _exchange(buffer, group):
        work = exchange.broadcast(buffer, source_index)
    else:
        work = dist.broadcast(buffer, group.ranks[source_index], group=group.handle, async_op=True)
    return CommunicationHandle(work, None if buffer is tensor else lambda: _unstage(tensor, buffer))


def barrier(group: Group) -> None:
    """Return once every member has called this."""
    if group.exchange is not None:
        group.exchange.barrier()
    elif group.handle is not None:
        dist.barrier(group.handle)
