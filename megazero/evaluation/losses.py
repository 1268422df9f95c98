"""Losses of chosen tokens from the last stage's hidden states, in blocks of rows. The logits of all rows never exist at
once, and logits are not communicated.

s sequence, b micro-batch, h hidden, v padded vocabulary, t = tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.linear import linear
from megazero.model.head import Head
from megazero.mpu.collectives import all_reduce
from megazero.mpu.cross_entropy import VocabularyLoss
from megazero.mpu.functional import copy_to_tp, gather_sequence
from megazero.mpu.head_loss import BLOCK_BYTES


@torch.no_grad()
def token_losses(
    head: Head, hidden: Tensor, labels: Tensor, counted: Tensor, *, greedy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(losses float64 [b, s], hits bool [b, s] or None), the same on every tp rank.

    hidden   [s, b, h], the last block's output; under sequence parallelism [s/t, b, h]
    labels   int64 [b, s]
    counted  bool [b, s]: the positions to score; at others the loss is 0, hits is True, and the head computes nothing
    greedy   also return in `hits` whether a label is the argmax over the vocabulary (the first of equal logits)

    A loss is natural-log cross-entropy, without label smoothing and z-loss. Communication per block of rows: that of
    `VocabularyLoss.of`; with `greedy` an all-reduce of as many maxima and minima; under sequence parallelism the hidden
    states are gathered.
    """
    layout = head.layout
    enter = gather_sequence if layout.sequence_parallel else copy_to_tp
    rows = enter(head.norm(hidden), layout.tp).transpose(0, 1)[counted]
    wanted = labels[counted]
    loss = head.loss_of_logits()
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=hidden.device)
    hits = torch.ones(labels.shape, dtype=torch.bool, device=hidden.device) if greedy else None
    found, agreed = [], []
    for row in _blocks(rows.shape[0], head.weight):
        logits = linear(rows[row], head.weight, None)
        found.append(loss.of(logits, wanted[row]).losses.double())
        if greedy:
            agreed.append(_argmax(logits, loss) == wanted[row])
        del logits
    if found:
        losses[counted] = torch.cat(found)
        if hits is not None:
            hits[counted] = torch.cat(agreed)
    return losses, hits


def _blocks(rows: int, weight: Tensor) -> list[slice]:
    """The blocks of rows whose logits are computed together."""
    kind = weight.device.type if weight.device.type in BLOCK_BYTES else "cuda"
    most = max(1, BLOCK_BYTES[kind] // (weight.shape[0] * weight.element_size()))
    return [slice(start, start + most) for start in range(0, rows, most)]


def _argmax(logits: Tensor, loss: VocabularyLoss) -> Tensor:
    """The first of the likeliest tokens, without padding, of logits [N, v/t]: int64 [N], the same on every tp rank.

    Two all-reduces of N elements over tp.
    """
    group, width = loss.group, logits.shape[1]
    start = group.index * width
    real = min(max(loss.vocab - start, 0), width)
    if real:
        largest, place = logits[:, :real].max(dim=1)
        place = place + start
    else:
        largest = logits.new_full(logits.shape[:1], -torch.inf)
        place = torch.full_like(largest, loss.vocab, dtype=torch.int64)
    if group.size > 1:
        best = largest.clone()
        all_reduce(best, group, "max").wait()
        place = torch.where(largest == best, place, loss.vocab)
        all_reduce(place, group, "min").wait()
    return place
