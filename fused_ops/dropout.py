"""Dropout whose mask is a hash of a key per row and the column, also fused with bias and residual.

x [..., k], keys int64 [...]: one per row. Backward computes the mask again, so only the keys are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import row_blocks
from fused_ops.counter_hash import halves
from fused_ops.native.library import Library, kernels, suffix


def _threshold(p: float) -> int:
    """The int32 below which a random half-word drops its element."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _arguments(keys: Tensor | None, p: float) -> tuple[Tensor | None, float, int]:
    return (None if keys is None else keys.contiguous()), 1.0 / (1.0 - p), _threshold(p)


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    if not x.numel():  # rows without columns cannot be counted
        return torch.empty_like(x)
    library = kernels(x)
    if library is not None:
        return _forward(library, x, None, None, keys, p)
    out = torch.mul(x, 1.0 / (1.0 - p)).contiguous()
    rows, keys = out.view(-1, x.shape[-1]), keys.reshape(-1)
    for row in row_blocks(x, rows.shape[0], x.shape[-1]):
        bits, _ = halves(keys[row], 0, x.shape[-1])
        rows[row].masked_fill_(bits[:, : x.shape[-1]] < _threshold(p), 0.0)
    return out


def _forward(
    library: Library, x: Tensor, bias: Tensor | None, residual: Tensor | None, keys: Tensor | None, p: float
) -> Tensor:
    columns = x.shape[-1]
    out = x.new_empty(x.shape)
    given = (
        x.contiguous(),
        bias if bias is None else bias.contiguous(),
        residual if residual is None else residual.contiguous(),
    )
    library.call(
        f"bias_dropout_residual_{suffix(x.dtype)}", x.numel() // columns, columns, out, *given, *_arguments(keys, p)
    )
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        return _dropped(x, keys, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (keys,) = ctx.saved_tensors
        return _Dropout.apply(grads[0], keys, ctx.p), None, None


class _BiasDropoutResidual(torch.autograd.Function):
    """The kernels; the bias gradient is summed in fp32 over fixed blocks of rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor | None, p: float, library: Library
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p, ctx.library, ctx.biased = p, library, bias is not None
        return _forward(library, x, bias, residual, keys, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (keys,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        if not ctx.biased:
            return grad if keys is None else _dropped(grad, keys, ctx.p), None, grad, None, None, None
        columns = grad.shape[-1]
        dx, sums = grad if keys is None else torch.empty_like(grad), grad.new_empty(columns, dtype=torch.float32)
        name = f"bias_dropout_backward_{suffix(grad.dtype)}"
        ctx.library.call(name, grad.numel() // columns, columns, dx, sums, grad, *_arguments(keys, ctx.p))
        return dx, sums.to(grad.dtype), grad, None, None, None


def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """Zero each element of x [..., k] with probability p and scale the others by 1/(1-p). keys int64 [...]."""
    result: Tensor = _Dropout.apply(x, keys, p)
    return result


def bias_dropout_residual(x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor | None, p: float) -> Tensor:
    """residual + dropout(x + bias): x and residual [..., k], bias [k] or None. keys None: no dropout, p must be 0."""
    assert keys is not None or p == 0.0
    if keys is None and bias is None and not torch.is_grad_enabled():
        return residual + x
    library = kernels(x, residual) if bias is None else kernels(x, residual, bias)
    if library is not None and x.numel() and residual.shape == x.shape:
        result: Tensor = _BiasDropoutResidual.apply(x, bias, residual, keys, p, library)
        return result
    biased = x if bias is None else x + bias
    return residual + (biased if keys is None else dropout(biased, keys, p))
