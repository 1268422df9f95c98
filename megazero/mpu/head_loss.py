"""The head's product and the loss together, in blocks of rows: whole logits never exist.

N tokens, h hidden, v padded vocabulary, t = tp size. The gradient of a block's logits is written over them as soon as
their losses are known, and goes into the gradients of the input and the weight at once; nothing waits for backward but
the input's gradient [N, h]. It needs to know what the loss will be multiplied by (16-bit gradients would underflow
without the loss scale): where the caller does not say, the weight's gradient waits in a buffer of its own.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import wide
from fused_ops.linear import add_weight_gradient, input_gradient, linear, put
from megazero.mpu.cross_entropy import VocabularyLoss
from megazero.mpu.gradient import hand_over, target_of

BLOCK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Logits that exist at once: on the CPU few enough blocks that packing the weight for each costs little, on a GPU
enough for its products to fill it.
"""

LEAST_ROWS = {"cpu": 1, "cuda": 4096}
"""Rows of a block, whatever its bytes. Every block adds a product to the weight's whole fp32 gradient, which moves 8
bytes an element beside 6 FLOPs an element and row: on an H100 (700 TFLOP/s, 3 TB/s) 311 / rows of the time of the
products.
"""


class LogitsMemory:
    """Where a block of logits lies: on the CPU the same memory in every step.

    Freed, the largest tensor of a step leaves a hole in the heap that fills with small ones, and the next step's has to
    lie elsewhere. A GPU's allocator keeps large blocks apart, and can lend them to others.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T, [m, v/t], valid until the next call."""
        if x.device.type != "cpu":
            return linear(x, weight, None)
        numel = x.shape[0] * weight.shape[0]
        if self._kept is None or self._kept.numel() < numel or self._kept.dtype != x.dtype:
            self._kept = None
            with torch.inference_mode(False):  # or no later pass with gradients could write there
                self._kept = x.new_empty(numel)
        return torch.mm(x, weight.t(), out=self._kept[:numel].view(x.shape[0], weight.shape[0]))


class _HeadLoss(torch.autograd.Function):
    """(x, weight, labels, counted, loss, factor, memory, with gradients) -> 0-dim sum of the losses that count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        counted: Tensor | None,
        loss: VocabularyLoss,
        factor: Tensor | None,
        memory: LogitsMemory,
        with_gradients: bool,
    ) -> Tensor:
        dtype = wide(x.dtype)
        total = torch.zeros((), dtype=dtype, device=x.device)
        grad_x = torch.empty_like(x) if with_gradients else None
        share = torch.ones((), dtype=dtype, device=x.device) if factor is None else factor.to(dtype)
        weight_too = with_gradients and ctx.needs_input_grad[1]
        target = target_of(weight) if factor is not None and weight_too else None
        buffer = torch.empty(weight.shape, dtype=dtype, device=x.device) if weight_too and target is None else None

        def add_block(row: slice) -> None:
            """A function of its own: a block's logits are gone before the next are made."""
            nonlocal total
            logits = memory.take(x[row], weight)
            rows = loss.of(logits, labels[row])
            total += (rows.losses if counted is None else torch.where(counted[row], rows.losses, 0.0)).sum()
            if grad_x is None:
                return
            shares = share.expand_as(rows.losses) if counted is None else torch.where(counted[row], share, 0.0)
            loss.write_gradient(logits, rows, shares)
            grad_x[row] = input_gradient(logits, weight)
            write = partial(add_weight_gradient, logits, x[row])
            if target is not None:
                target.add(write)
            elif buffer is not None:
                write(buffer, row.start > 0)

        for row in _blocks(x, weight):
            add_block(row)
        ctx.save_for_backward(grad_x, weight, buffer, factor)
        ctx.in_target, ctx.target = target is not None, target_of(weight)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_x, weight, buffer, factor = ctx.saved_tensors
        rest: tuple[None, ...] = (None,) * 6
        if factor is not None:
            assert grads[0].device.type != "cpu" or bool(grads[0] == factor.to(grads[0].dtype)), (
                "the loss was multiplied by another factor than announced"
            )
        else:
            grad_x = (grad_x * grads[0]).to(grad_x.dtype)
            if buffer is not None:
                buffer.mul_(grads[0])
        if ctx.in_target or not ctx.needs_input_grad[1]:
            return grad_x, None, *rest
        return grad_x, hand_over(weight, ctx.target, partial(put, buffer)), *rest


def _blocks(x: Tensor, weight: Tensor) -> list[slice]:
    """Rows of x whose logits exist together: blocks of nearly equal size."""
    kind = x.device.type if x.device.type in BLOCK_BYTES else "cuda"
    most = max(LEAST_ROWS[kind], BLOCK_BYTES[kind] // (weight.shape[0] * x.element_size()))
    count = max(1, -(-x.shape[0] // most))
    bounds = [x.shape[0] * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    counted: Tensor | None,
    loss: VocabularyLoss,
    factor: Tensor | None,
    memory: LogitsMemory | None = None,
) -> Tensor:
    """Sum of the losses of the tokens that count, 0-dim, replicated; fp32 for 16-bit x, else of x's dtype.

    x        [N, h], replicated, whose gradient is a partial sum of each tp rank (`copy_to_tp`, `gather_sequence`)
    weight   [v/t, h], this rank's rows of the vocabulary
    labels   int64 [N]; counted: bool [N], or None for all
    factor   0-dim: what the loss's backward will start from, if that is known; the weight's gradient then goes to its
             target during forward. A backward from anything else fails
    memory   for the logits, kept by the caller from step to step; default: memory of this call

    Communication: per block of rows that of `VocabularyLoss.of`; backward none.
    """
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    result: Tensor = _HeadLoss.apply(x, weight, labels, counted, loss, factor, memory or LogitsMemory(), with_gradients)
    return result
