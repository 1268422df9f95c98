"""The head's product and the loss together, in blocks of rows, so that the whole logits never exist.

N tokens, h hidden, v padded vocabulary, t = tp size. Forward also computes the gradients: it overwrites a block's
logits with their gradient as soon as the block's losses are known, and adds this to the gradients of the input and the
weight. Only the input's gradient [N, h] is kept for backward. Forward must know the factor by which the loss will be
multiplied (without the loss scale 16-bit gradients would underflow). If the caller does not give it, the weight's
gradient is kept for backward too.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.linear import add_weight_gradient, input_gradient, linear, linear_into, write_or_add
from fused_ops.native.stand_in import kind_of, witness
from megazero.mpu.cross_entropy import VocabularyLoss
from megazero.mpu.gradient import route_gradient, target_of

BLOCK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Bytes of logits that exist at once. On the CPU blocks are large enough that packing the weight for each costs little;
on a GPU each block's GEMM fills the device.
"""

LEAST_ROWS = {"cpu": 1, "cuda": 4096}
"""Least rows of a block, also where they exceed BLOCK_BYTES. Every block reads and writes the weight's whole fp32
gradient: 8 bytes per element, against 6 FLOPs per element and row. On an H100 (700 TFLOP/s, 3 TB/s) this costs
311 / rows of the GEMMs' time.
"""


class LogitsMemory:
    """Memory for a block of logits: on the CPU it is kept from step to step.

    Logits are the largest tensor of a step. If it were freed, small tensors would fragment its memory, and the next
    step would need new memory. The caching allocator of a GPU keeps large blocks and can reuse them for other tensors.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [m, h] times weight^T, weight [v/t, h]: [m, v/t], valid until the next call."""
        if kind_of(x.device) != "cpu":
            return linear(x, weight, None)
        numel = x.shape[0] * weight.shape[0]
        if self._kept is None or self._kept.numel() < numel or self._kept.dtype != x.dtype:
            self._kept = None
            with torch.inference_mode(False):  # autograd could not write into an inference tensor later
                self._kept = x.new_empty(numel)
        return linear_into(x, weight, self._kept[:numel].view(x.shape[0], weight.shape[0]))


class _HeadLoss(torch.autograd.Function):
    """(x, weight, labels, counted, loss, factor, memory, with_gradients) -> 0-dim sum of the counted losses."""

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
        dtype = opmath_dtype(x.dtype)
        total = torch.zeros((), dtype=dtype, device=x.device)
        grad_x = torch.empty_like(x) if with_gradients else None
        share = torch.ones((), dtype=dtype, device=x.device) if factor is None else factor.to(dtype)
        weight_too = with_gradients and ctx.needs_input_grad[1]
        target = target_of(weight) if factor is not None and weight_too else None
        buffer = torch.empty(weight.shape, dtype=dtype, device=x.device) if weight_too and target is None else None

        def add_block(row: slice) -> None:
            """A function, so that its local names free a block's logits before the next block is made."""
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

        for row in blocks_of(x, weight):
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
        return grad_x, route_gradient(weight, ctx.target, partial(write_or_add, buffer)), *rest


def blocks_of(x: Tensor, weight: Tensor) -> list[slice]:
    """The rows of x in blocks of nearly equal size, each of which is one product with the weight."""
    blocks = logit_blocks(x.shape[0], weight.shape[0] * x.element_size(), kind_of(x.device))
    # on the meta device the largest takes the memory of each
    return blocks[-1:] if x.is_meta and witness() is None else blocks


def logit_blocks(rows: int, row_bytes: int, kind: str) -> list[slice]:
    """Rows of logits in blocks, the largest last. kind: of device, cpu, cuda or another."""
    kind = kind if kind in BLOCK_BYTES else "cuda"
    most = max(LEAST_ROWS[kind], BLOCK_BYTES[kind] // row_bytes)
    count = max(1, -(-rows // most))
    bounds = [rows * i // count for i in range(count + 1)]
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
    """Sum of the losses of the counted tokens, 0-dim, replicated; fp32 for 16-bit x, else of x's dtype.

    x        [N, h], replicated. Its gradient is a partial sum on each tp rank (`copy_to_tp` or `gather_sequence` adds
             these up)
    weight   [v/t, h], this rank's rows of the vocabulary
    labels   int64 [N]
    counted  bool [N], the tokens whose loss counts; None: all
    loss     the cross-entropy and its tp group
    factor   0-dim: the gradient with which backward will start, if it is known. The weight's gradient then goes to its
             target during forward. A backward from another value fails an assertion (on a GPU: is not noticed)
    memory   memory for the logits that the caller keeps from step to step; default: new memory

    Communicates in forward, per block of rows, what `VocabularyLoss.of` does; in backward nothing.
    """
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    result: Tensor = _HeadLoss.apply(x, weight, labels, counted, loss, factor, memory or LogitsMemory(), with_gradients)
    return result
