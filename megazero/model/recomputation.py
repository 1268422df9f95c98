"""A block whose forward keeps nothing but its input, and whose backward computes it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megazero.model.batch import MicroBatch
from megazero.model.block import Block
from megazero.mpu.collectives import all_gather
from megazero.mpu.grid import Group


def recomputed(block: Block, hidden: Tensor, batch: MicroBatch, shared_by: Group | None = None) -> Tensor:
    """block(hidden, batch), of which only the input is kept for backward.

    shared_by: ranks that all have this hidden state. Each keeps 1 / size of it, and backward gathers the parts, which
    gives the same bits. Communicates then, in backward: an all-gather over them of the hidden state, padded by less
    than one element for each rank; and what the block does.
    """
    if shared_by is None or not torch.is_grad_enabled():
        return _checkpointed(block, hidden, batch)
    whole, shape, graded, group = [hidden], hidden.shape, hidden.requires_grad, shared_by

    def again(part: Tensor, batch: MicroBatch) -> Tensor:
        """The first time with the whole input, which is let go; later with the one that is gathered."""
        return block(whole.pop() if whole else _gathered(part, shape, group).requires_grad_(graded), batch)

    return _checkpointed(again, _part(hidden.detach(), group), batch)


def _checkpointed(block: Callable[[Tensor, MicroBatch], Tensor], hidden: Tensor, batch: MicroBatch) -> Tensor:
    output: Tensor = checkpoint(block, hidden, batch, use_reentrant=False, preserve_rng_state=False)
    return output


def _part(whole: Tensor, group: Group) -> Tensor:
    """A copy of this rank's part of the elements; the last parts are padded with zeros to the length of the first."""
    length = -(-whole.numel() // group.size)
    own = whole.reshape(-1)[group.index * length : (group.index + 1) * length]
    part = whole.new_zeros(length)
    part[: own.numel()] = own
    return part


def _gathered(part: Tensor, shape: torch.Size, group: Group) -> Tensor:
    whole = part.new_empty(part.numel() * group.size)
    all_gather(whole, part, group).wait()
    return whole[: shape.numel()].view(shape)
