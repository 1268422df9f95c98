"""Cross-entropy of logits whose vocabulary is shared out over tp, without a second copy of the logits.

N tokens, v padded vocabulary, t = tp size; rank r holds columns [r*v/t, (r+1)*v/t). Temporaries exist for a block of
rows at a time. Backward writes the gradient over the logits, whose producer (the head's product) does not need them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import rows_of, wide
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group, vocab: int, label_smoothing: float, z_loss: float) -> Tensor:
        count, width = logits.shape
        start = group.index * width
        real = min(max(vocab - start, 0), width)
        dtype = wide(logits.dtype)
        target = labels - start
        target = target.masked_fill((target < 0) | (target >= real), -1)
        largest = torch.full((count,), -torch.inf, dtype=dtype, device=logits.device)
        # Rows: sum of exponentials, logit of the label, and sum of all logits where label smoothing needs it.
        sums = torch.zeros((3 if label_smoothing else 2, count), dtype=dtype, device=logits.device)
        rows = rows_of(logits, width)
        for row in (slice(i, i + rows) for i in range(0, count if real else 0, rows)):
            values = logits[row, :real].to(dtype)
            torch.amax(values, dim=1, out=largest[row])
            picked = values.gather(1, target[row, None].clamp(min=0)).squeeze(1)
            sums[1, row] = picked.masked_fill_(target[row] < 0, 0.0)
            if label_smoothing:
                sums[2, row] = values.sum(1)
            # A row of -inf only has no largest value to subtract; its sum of exponentials is 0.
            sums[0, row] = (values - largest[row, None].clamp(min=torch.finfo(dtype).min)).exp_().sum(1)
        if group.size > 1:
            own = largest.clone()
            all_reduce(largest, group, "max").wait()
            sums[0] *= torch.where(own == -torch.inf, 0.0, (own - largest).exp())
            all_reduce(sums, group).wait()
        log_normaliser = sums[0].log().add_(largest)
        loss = log_normaliser - (1.0 - label_smoothing) * sums[1]
        if label_smoothing:
            loss -= (label_smoothing / vocab) * sums[2]
        if z_loss:
            loss += z_loss * log_normaliser.square()
        ctx.save_for_backward(logits, target, log_normaliser)
        ctx.numbers = real, vocab, label_smoothing, z_loss
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, target, log_normaliser = ctx.saved_tensors
        real, vocab, label_smoothing, z_loss = ctx.numbers
        grad = grads[0]
        weight = grad * (1.0 + 2.0 * z_loss * log_normaliser) if z_loss else grad
        hit = torch.where(target >= 0, grad * (label_smoothing - 1.0), 0.0)
        rows = rows_of(logits, logits.shape[1])
        for row in (slice(i, i + rows) for i in range(0, logits.shape[0] if real else 0, rows)):
            block = logits[row, :real]
            values = (block.to(grad.dtype) - log_normaliser[row, None]).exp_().mul_(weight[row, None])
            if label_smoothing:
                values -= (label_smoothing / vocab) * grad[row, None]
            # One element per row, by index: scatter_add_ has no deterministic kernel on CUDA.
            own = torch.arange(values.shape[0], device=values.device), target[row].clamp(min=0)
            values[own] += hit[row]
            block.copy_(values)
        logits[:, real:] = 0
        return logits, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, *, vocab: int, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Loss of each token [N], replicated; fp32 for 16-bit logits, else of the logits' dtype.

    logits [N, v/t], labels int64 [N] in [0, vocab). Columns from `vocab` on are padding: they take no part and get a
    zero gradient. With e = label_smoothing, z = z_loss, Z = sum_V exp(x): loss = (1-e)(log Z - x_label) +
    e * mean over the real vocabulary of (log Z - x) + z (log Z)^2  (z-loss: Chowdhery et al. 2022, arXiv:2204.02311).

    Communication: all-reduce of N maxima, all-reduce of 2N (with label smoothing 3N) sums; backward none.
    The logits are destroyed in backward: nothing may read them after, and a graph runs backward once.
    """
    assert logits.dim() == 2 and labels.shape == logits.shape[:1] and logits.shape[1] * group.size >= vocab
    result: Tensor = _CrossEntropy.apply(logits, labels, group, vocab, label_smoothing, z_loss)
    return result
