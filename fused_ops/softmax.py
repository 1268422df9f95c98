"""Scaled causal softmax with ALiBi.

b micro-batch, n heads of this rank, sq queries, sk keys. The kernel works in place row by row, the reference body in
blocks of rows. There is no bias, mask or fp32 copy of shape [b, n, sq, sk].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import block_elements, opmath_dtype
from fused_ops.compiled import compilable, runs_compiled
from fused_ops.native.library import kernels, suffix
from fused_ops.native.stand_in import META, kind_of, witness


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes of all heads of the model (Press et al. 2022, arXiv:2108.12409, for any number of heads).

    For a power of two: start^(i+1) with start = 2^(-8/heads). Else the slopes of c heads, c being the next lower power
    of two, followed by every second slope of 2c heads. Raises ValueError below one head.
    """
    if heads < 1:
        raise ValueError(f"ALiBi needs at least one head, not {heads}")
    c = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / c) for i in range(c)]
    return slopes if c == heads else slopes + [2.0 ** (-4.0 * (i + 1) / c) for i in range(0, 2 * (heads - c), 2)]


def _blocks(planes: int, queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    """(planes, rows, number of keys that its last row sees) of each block. A plane is one head of one sample.

    A block has few rows of several planes, so that few keys beyond the rows' positions are computed. On the meta device
    the last two are enough, which see most keys, unless work is counted.
    """
    size = block_elements(device)
    rows = max(1, min(queries, 64 if kind_of(device) == "cpu" else 512, size // max(1, keys)))
    together = max(1, size // (rows * keys))
    meta = device.type == META and witness() is None
    for row in range(max(0, queries - 2 * rows) if meta else 0, queries, rows):
        stop = min(row + rows, queries)
        for plane in range(0, min(planes, 2 * together) if meta else planes, together):
            yield slice(plane, min(plane + together, planes)), slice(row, stop), keys - queries + stop


def _forward(probs: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None) -> None:
    """Reference body: overwrite the scores with probabilities."""
    b, n, queries, keys = probs.shape
    planes = probs.view(b * n, queries, keys)
    dtype = opmath_dtype(probs.dtype)
    if slopes is not None:
        slopes = slopes.to(device=probs.device, dtype=dtype).repeat(b).view(-1, 1, 1)
        key = torch.arange(keys, device=probs.device, dtype=dtype)
    if documents is not None:
        documents = documents.repeat_interleave(n, dim=0)
    for plane, row, seen in _blocks(b * n, queries, keys, probs.device):
        whole = planes[plane, row]
        values = torch.mul(whole[..., :seen].to(dtype), scale)
        if slopes is not None:
            values += slopes[plane] * key[:seen]
        # The block's first row sees all of these keys but the last height - 1, so the mask is a triangle at their end.
        height = whole.shape[1]
        future = torch.ones((height, height), dtype=torch.bool, device=probs.device).triu_(1)
        values[..., seen - height :].masked_fill_(future, -math.inf)
        if documents is not None:
            own = documents[plane, keys - queries :][:, row, None]
            values.masked_fill_(documents[plane, None, :seen] != own, -math.inf)
        whole[..., :seen] = torch.softmax(values, dim=-1)
        whole[..., seen:] = 0


def _backward(probs: Tensor, grad: Tensor, scale: float) -> None:
    """Reference body: overwrite the probabilities with the gradient of the scores."""
    b, n, queries, keys = probs.shape
    planes, grad = probs.view(b * n, queries, keys), grad.reshape(b * n, queries, keys)
    dtype = opmath_dtype(probs.dtype)
    for plane, row, seen in _blocks(b * n, queries, keys, probs.device):
        p = planes[plane, row, :seen]
        value = p.to(dtype)
        weighted = value * grad[plane, row, :seen]
        total = weighted.sum(-1, keepdim=True)
        p.copy_(weighted.sub_(value * total).mul_(scale))


class _Softmax(torch.autograd.Function):
    """Saves only the probabilities, which are in the scores' storage. Backward overwrites them with the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
        # An alias instead of `mark_dirty`, which would copy the gradient three times where the scores are a view. It
        # shares the version counter, so another op that has saved the scores raises in its backward.
        probs = scores.detach()
        ctx.library = kernels(scores) if scores.numel() else None
        if ctx.library is None:
            _forward(probs, scale, slopes, documents)
        else:
            bias = None if slopes is None else slopes.to(torch.float32).contiguous()
            own = None if documents is None else documents.to(torch.int64).contiguous()
            ctx.library.call(f"softmax_{suffix(scores.dtype)}", *scores.shape, probs, bias, own, float(scale))
            increment_version(probs)
        ctx.save_for_backward(probs)
        ctx.scale = scale
        return probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (probs,) = ctx.saved_tensors
        # This overwrites the probabilities and not the incoming gradient, which other ops may share. All consumers of
        # the probabilities have run their backward by now; one that has not would raise by the version counter.
        if ctx.library is None:
            _backward(probs, grads[0], ctx.scale)
        else:
            name = f"softmax_backward_{suffix(probs.dtype)}"
            ctx.library.call(name, *probs.shape, probs, grads[0].contiguous(), float(ctx.scale))
            increment_version(probs)
        return probs, None, None, None


class _Whole(torch.autograd.Function):
    """All scores at once, out of place, for torch.compile, which fuses it into one pass. Saves the rounded
    probabilities.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
        queries, keys = scores.shape[2:]
        key = torch.arange(keys, device=scores.device)
        values = scores.to(opmath_dtype(scores.dtype)) * scale
        if slopes is not None:
            values = values + slopes.to(values.dtype).view(-1, 1, 1) * key
        hidden = key > torch.arange(keys - queries, keys, device=scores.device).unsqueeze(1)
        if documents is not None:
            hidden = hidden | (documents[:, None, keys - queries :, None] != documents[:, None, None, :])
        probs = torch.softmax(values.masked_fill(hidden, -math.inf), dim=-1).to(scores.dtype)
        ctx.save_for_backward(probs)
        ctx.scale = scale
        return probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (probs,) = ctx.saved_tensors
        p = probs.to(opmath_dtype(probs.dtype))
        weighted = p * grads[0]
        return ((weighted - p * weighted.sum(-1, keepdim=True)) * ctx.scale).to(probs.dtype), None, None, None


@compilable
def _whole(scores: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
    result: Tensor = _Whole.apply(scores, scale, slopes, documents)
    return result


def scaled_causal_alibi_softmax(
    scores: Tensor, scale: float, slopes: Tensor | None, *, documents: Tensor | None = None
) -> Tensor:
    """softmax(scale * scores + slope * key position) over the visible keys, in place on `scores` [b, n, sq, sk].

    Query i has position sk - sq + i and sees keys up to its own. scores: contiguous. slopes [n]: of this rank's heads,
    or None. documents int64 [b, sk]: a query sees keys of its own document only. 16-bit scores are computed in fp32 and
    rounded once, fp32 and fp64 in their own dtype. The result is in the scores' storage (unless compiled). Backward
    overwrites it with the gradient: it must not be read afterwards, and backward runs once per graph.
    """
    assert scores.is_contiguous() and scores.shape[3] >= scores.shape[2]
    if runs_compiled() and kernels(scores) is None:
        return _whole(scores, scale, slopes, documents)
    result: Tensor = _Softmax.apply(scores, scale, slopes, documents)
    return result
