"""The two passes of a vocabulary-parallel cross-entropy over rows of logits. The caller communicates between them.

N tokens, w columns on this rank, of which the first `real` are vocabulary and the others padding. target int64 [N]: the
label's column on this rank, -1 where another rank holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import opmath_dtype, row_blocks
from fused_ops.native.library import Library, kernels, suffix


def row_statistics(logits: Tensor, target: Tensor, real: int, *, summed: bool) -> tuple[Tensor, Tensor]:
    """(largest [N], sums [2 or 3, N]) of logits [N, w], in fp32 (fp64 for fp64 logits). The kernels read logits once.

    sums[0]: sum of exp(x - largest). sums[1]: the label's logit, 0 where target is -1. sums[2], if `summed`: sum of the
    logits. Without real columns, or if all are -inf, largest is -inf and sums[0] is 0.
    """
    dtype = opmath_dtype(logits.dtype)
    library = _library(logits)
    if library is not None:
        largest, sums = (
            logits.new_empty(size, dtype=dtype) for size in (logits.shape[0], (3 if summed else 2, logits.shape[0]))
        )
        shape = logits.shape[0], logits.stride(0), real
        library.call(
            f"row_statistics_{suffix(logits.dtype)}", *shape, logits, target.contiguous(), largest, sums, int(summed)
        )
        return largest, sums
    largest = torch.full((logits.shape[0],), -torch.inf, dtype=dtype, device=logits.device)
    sums = torch.zeros((3 if summed else 2, logits.shape[0]), dtype=dtype, device=logits.device)
    for row in row_blocks(logits, logits.shape[0] if real else 0, logits.shape[1]):
        values = logits[row, :real].to(dtype)
        torch.amax(values, dim=1, out=largest[row])
        picked = values.gather(1, target[row, None].clamp(min=0)).squeeze(1)
        sums[1, row] = picked.masked_fill_(target[row] < 0, 0.0)
        if summed:
            sums[2, row] = values.sum(1)
        # In a row of -inf only, the lowest finite number is subtracted; the sum of exponentials is 0.
        sums[0, row] = (values - largest[row, None].clamp(min=torch.finfo(dtype).min)).exp_().sum(1)
    return largest, sums


@torch.no_grad()
def write_gradient(
    logits: Tensor,
    target: Tensor,
    real: int,
    log_normaliser: Tensor,
    weight: Tensor,
    hit: Tensor,
    smooth: Tensor | None = None,
) -> None:
    """Overwrite the logits x [N, w] with exp(x - log_normaliser) * weight - smooth, plus `hit` at the label; padding:
    0.

    log_normaliser, weight, hit and smooth (None: 0): [N], fp32 (fp64 for fp64 logits).
    """
    library = _library(logits)
    if library is not None:
        numbers = [
            None if x is None else x.to(torch.float32).contiguous() for x in (log_normaliser, weight, smooth, hit)
        ]
        shape = (*logits.shape, logits.stride(0), real)
        library.call(f"write_gradient_{suffix(logits.dtype)}", *shape, logits, target.contiguous(), *numbers)
        increment_version(logits)
        return
    for row in row_blocks(logits, logits.shape[0] if real else 0, logits.shape[1]):
        block = logits[row, :real]
        values = (block.to(weight.dtype) - log_normaliser[row, None]).exp_().mul_(weight[row, None])
        if smooth is not None:
            values -= smooth[row, None]
        # One element per row by indexing, since scatter_add_ has no deterministic kernel on CUDA.
        own = torch.arange(values.shape[0], device=values.device), target[row].clamp(min=0)
        values[own] += torch.where(target[row] >= 0, hit[row], 0.0)
        block.copy_(values)
    logits[:, real:] = 0


def _library(logits: Tensor) -> Library | None:
    """The kernels, if they take these logits. Rows may be slices of wider ones."""
    return kernels(logits) if logits.numel() and (logits.stride(1) == 1 or logits.shape[1] == 1) else None
