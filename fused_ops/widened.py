"""Products of 16-bit factors on CPUs that have no instructions for them.

There torch multiplies element by element, up to 140 times slower than in fp32. Here the factors are widened to fp32 a
block at a time, multiplied by the fp32 library, and the result is rounded once. The blocks are in memory that a thread
keeps, at most 9 MiB. As what a matrix library takes for itself, plans of memory leave it out.

m rows (tokens), k inputs, n outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_ops.blocks import HALVES
from fused_ops.native.library import suffix

ROWS, COLUMNS, DEPTH = 512, 512, 2048
"""Of a block of the result, and how much of k is summed at a time: 4 MiB of each factor. The fp32 product is then at
least 0.8 times as fast as with whole fp32 factors.
"""


def lacks_products(x: Tensor) -> bool:
    """Whether x is a 16-bit tensor on a CPU for which torch has no fast product."""
    return x.device.type == "cpu" and x.dtype in HALVES and not _has_products(x.dtype)


@cache
def _has_products(dtype: torch.dtype) -> bool:
    """Whether torch gives products of this 16-bit dtype to oneDNN on this processor; this is the test that it makes."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{suffix(dtype)}_supported")())


def weight_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias: x [..., k], weight [n, k], bias [n] -> [..., n], written to `out` [m, n] if there is one.

    The bias is added before the sums are rounded.
    """
    made = x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
    _multiply(_matrix(x), weight.t(), _matrix(made), bias=bias)
    return made


def input_product(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight: grad [..., n], weight [n, k] -> [..., k], contiguous."""
    made = grad.new_empty((*grad.shape[:-1], weight.shape[1]))
    _multiply(_matrix(grad), weight, _matrix(made))
    return made


def _matrix(x: Tensor) -> Tensor:
    """[..., k] -> [m, k]; a view of what is contiguous or a matrix already."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def add_row_product(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """Write (or add) grad^T x, for grad [m, n] and x [m, k], to `into` [n, k], rounded to its dtype once."""
    _multiply(grad.t(), x, into, add=add)


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b for a batch of matrices of one dtype: a [batch, m, k], b [batch, k, n] -> [batch, m, n];
    differentiable. Backward keeps the 16-bit factors.
    """
    result: Tensor = _Product.apply(a, b, scale)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return _each(a, b, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return _each(grads[0], b.mT, ctx.scale), _each(a.mT, grads[0], ctx.scale), None


def _each(a: Tensor, b: Tensor, scale: float) -> Tensor:
    made = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for left, right, into in zip(a, b, made, strict=True):
        _multiply(left, right, into, scale=scale)
    return made


class _Scratch(threading.local):
    """fp32 memory of a thread for the largest block of each factor and of the result. It is numpy's, so that no
    allocator or profiler of torch's counts it.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):  # else nothing could write to it outside
            self._areas = [
                torch.from_numpy(np.empty(numel, np.float32))
                for numel in (ROWS * DEPTH, DEPTH * COLUMNS, ROWS * COLUMNS)
            ]

    def area(self, number: int, rows: int, columns: int) -> Tensor:
        """[rows, columns] of an area, with any content."""
        return self._areas[number][: rows * columns].view(rows, columns)

    def widened(self, number: int, factor: Tensor) -> Tensor:
        """A factor [rows, columns] in an area, in its own order of memory."""
        if factor.stride(0) < factor.stride(1):
            return self.widened(number, factor.t()).t()
        return self.area(number, *factor.shape).copy_(factor)


_SCRATCH = _Scratch()


@torch.no_grad()
def _multiply(
    a: Tensor, b: Tensor, into: Tensor, *, scale: float = 1.0, bias: Tensor | None = None, add: bool = False
) -> None:
    """Write (or add) scale a b + bias to `into`: a [m, k], b [k, n], bias [n], into [m, n], all with any strides.

    Raises ValueError where the shapes or the factors' dtypes do not fit.
    """
    if a.shape[1] != b.shape[0] or into.shape != (a.shape[0], b.shape[1]) or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype} {list(a.shape)} times {b.dtype} {list(b.shape)} does not fit {list(into.shape)}")
    for rows in _blocks(a.shape[0], ROWS):
        for columns in _blocks(b.shape[1], COLUMNS):
            made = _SCRATCH.area(2, rows.stop - rows.start, columns.stop - columns.start).zero_()
            for depth in _blocks(a.shape[1], DEPTH):
                made.addmm_(_SCRATCH.widened(0, a[rows, depth]), _SCRATCH.widened(1, b[depth, columns]))
            if scale != 1.0:
                made.mul_(scale)
            if bias is not None:
                made.add_(bias[columns])
            block = into[rows, columns]
            _ = block.add_(made) if add else block.copy_(made)


def _blocks(length: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, length)) for start in range(0, length, most))
