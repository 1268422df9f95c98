"""Tensor-parallel shards of Megatron and its descendants: joining them to global tensors, and cutting these.

All of these programs split the same matrices along the same axes. Vocabulary padding is at the end of the joined table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.config.inventory import tp_axis
from megazero.convert.report import ConversionReport, Disagreement
from megazero.convert.source import ConversionError

_BLOCK = 1 << 22


def join_shards(
    key: str, pieces: Sequence[Tensor], axis: int | None, report: ConversionReport, rows: int | None = None
) -> Tensor:
    """The global tensor of the ranks' pieces, in rank order. rows: how many of its rows are not padding; None: all.

    Without an axis the pieces are replicas. A single piece is returned as it is, a view of its file. Raises
    ConversionError where the pieces have different shapes.
    """
    shapes = {tuple(piece.shape) for piece in pieces}
    if len(shapes) > 1:
        raise ConversionError(
            f"{key}: tensor-parallel ranks hold pieces of the shapes {', '.join(str(list(s)) for s in sorted(shapes))}"
        )
    if axis is None:
        return reconcile_replicas(key, pieces, report)
    whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=axis)
    return whole if rows is None else whole[:rows]


def reconcile_replicas(key: str, copies: Sequence[Tensor], report: ConversionReport) -> Tensor:
    """The value of replicas: the first where all are equal, bit for bit. Otherwise their mean in float64, which is
    reported.

    Equal replicas are not averaged, because in 16 bits a sum of eight equal numbers is rounded.
    """
    first = copies[0]
    if all(_same_bits(first, copy) for copy in copies[1:]):
        return first
    mean, largest = torch.empty_like(first, memory_format=torch.contiguous_format), 0.0
    blocks = zip(mean.view(-1).split(_BLOCK), *(copy.reshape(-1).split(_BLOCK) for copy in copies), strict=True)
    for target, *parts in blocks:  # in blocks, because the largest tensor in float64 may not fit in memory
        wide = torch.stack(parts).to(torch.float64)
        middle = wide.mean(dim=0)
        largest = max(largest, float((wide - middle).abs().max()))
        target.copy_(middle)
    if all(known.key != key for known in report.replicas):  # a tensor may be read again, to verify
        report.replicas.append(Disagreement(key, len(copies), largest))
    return mean


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def cut_shards(name: str, whole: Tensor, ranks: int) -> list[Tensor]:
    """The pieces of one of our tensors (with padding) for tp ranks: views, in rank order.

    Raises ConversionError.
    """
    axis = tp_axis(name)
    if axis is None:
        return [whole] * ranks
    if whole.shape[axis] % ranks:
        raise ConversionError(f"{name}: axis {axis} of {list(whole.shape)} cannot be divided by --tp {ranks}")
    return list(whole.chunk(ranks, dim=axis))
