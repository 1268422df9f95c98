"""Matrix products that torch computes slowly on a CPU: of 16-bit factors where the processor has no instructions for
them, and of fp32 factors on AMD's processors.

Without such instructions torch multiplies 16 bits element by element, up to 140 times slower than fp32. Here factors
become fp32 a block at a time, sums are fp32, and the result is rounded once. Memory for the blocks belongs to a thread
and stays below 9 MiB. As what a matrix library takes for itself, plans of memory leave it out.

The kernel (`csrc/cpu/product.cpp`) widens while it packs. The plain body, for machines without a compiler, widens
blocks and multiplies by torch's fp32 product; it is the specification.

m rows (tokens), k inputs, n outputs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_ops.blocks import HALVES
from fused_ops.known import disagreement, known_numbers
from fused_ops.native.compile import processor_flags, processor_vendor
from fused_ops.native.library import SUFFIXES, Library, choice, cpu_library, suffix

ROWS, COLUMNS, DEPTH = 512, 512, 2048
"""Of a block of the plain body's result, and how much of k is summed at a time: 4 MiB of each factor. The fp32 product
is then at least 0.8 times as fast as with whole fp32 factors.
"""
LEAST = 256
"""Of an fp32 product that is computed here each of m, n and k. What is smaller or thinner torch's library multiplies as
fast or faster: packing takes as long as the products of thirty rows, and a call from Python ten microseconds.
"""
TORCH, WIDENED = "torch", "torch in fp32, block by block"
"""What computes a dtype's products where they are not computed here, and where no kernel is."""
_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Instructions to which oneDNN can be limited, with AVX-512 and without its BF16."""
_ALLOWED = 1e-6
"""Largest relative error, in the norm, of the kernel's fp32 sums in its trial."""


def lacks_products(x: Tensor) -> bool:
    """Whether x is a 16-bit tensor on a CPU for which torch has no fast product."""
    return x.device.type == "cpu" and lacks(x.dtype)


def lacks(dtype: torch.dtype) -> bool:
    """Whether this is a 16-bit dtype for which torch has no fast product on this machine's CPU."""
    return dtype in HALVES and not _has_products(dtype)


def own_products(x: Tensor, outputs: int, inputs: int) -> bool:
    """Whether the products of a layer [outputs, inputs] with the rows of x are computed here: those that torch lacks,
    and fp32's where the kernel is faster.
    """
    if x.dtype != torch.float32:
        return lacks_products(x)
    rows = x.numel() // max(1, x.shape[-1])
    return min(rows, outputs, inputs) >= LEAST and x.device.type == "cpu" and _multiplies(x.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are computed here, if they are large."""
    return lacks(dtype) or (dtype == torch.float32 and _is_faster() and _kernel(dtype, choice()) is not None)


@cache
def _has_products(dtype: torch.dtype) -> bool:
    """Whether torch gives products of this 16-bit dtype to oneDNN on this processor, by the test that it makes, and
    oneDNN has instructions for them.

    With AVX-512 and without its BF16 oneDNN takes bf16 too, but takes it apart with other instructions: half as fast as
    fp32.
    """
    flags = processor_flags()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and "avx512f" in flags and ("avx512_bf16" not in flags or limit in _WITHOUT_BF16):
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{suffix(dtype)}_supported")())


@cache
def _is_faster() -> bool:
    """Whether the kernel multiplies fp32 faster than torch's library. By the maker of the processor: MKL has no code of
    its own for AMD's. A measurement would answer differently from one run to the next, and the sums would differ with
    it.
    """
    return processor_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available()


@cache
def _kernel(dtype: torch.dtype, asked: str) -> Library | None:
    """The kernel for factors of this dtype and a choice of MEGAZERO_FUSED, if there is one that passes its trial."""
    library = cpu_library(asked) if dtype in SUFFIXES else None
    if library is None or library.on_device or refusal(library, dtype):
        return None
    return library


@cache
def refusal(library: Library, dtype: torch.dtype) -> str:
    """Why the kernel is not used for a dtype on this machine, in a line; empty if its results agree with float64.

    It is tried once in a process, with strides of every kind, a batch, sizes that are no multiples of a block, more
    inputs than one packing takes, and results of both widths, which are written and added to.
    """
    for m, n, k in ((37, 45, 77), (19, 70, 1030)):
        a, b = (
            known_numbers(2, m, k + 3, seed=m, dtype=dtype)[..., 2 : k + 2],
            known_numbers(2, k, n, seed=n, dtype=dtype),
        )
        bias, before = known_numbers(n, seed=k, dtype=dtype), known_numbers(2, m, n, seed=1, dtype=torch.float32)
        exact = 0.5 * (a.double() @ b.double()) + bias.double()
        for left in (a, a.mT.contiguous().mT):
            for right in (b, b.mT.contiguous().mT):
                for into, add in ((before.clone(), True), (before.to(dtype), False)):
                    wanted = (exact + before.double() if add else exact).to(into.dtype)
                    _call(library, left, right, into, 0.5, bias, add)
                    allowed = _ALLOWED if into.dtype == torch.float32 else torch.finfo(dtype).eps / 4
                    if off := disagreement(into, wanted, allowed):  # of 16 bits those close to a tie may be others
                        return f"{off} on this machine"
    return ""


def body_of(dtype: torch.dtype) -> str:
    """What computes products of this dtype on the CPU: torch, a level's kernel, or torch's product of fp32 factors that
    were widened.
    """
    if not _multiplies(dtype):
        return TORCH
    if (library := _kernel(dtype, choice())) is not None:
        return f"{library.level} kernel"
    built = cpu_library(choice())
    if built is None or built.on_device:
        return WIDENED
    return f"{WIDENED}, as the {built.level} kernel is {refusal(built, dtype)}"


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
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


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
        return _new_product(a, b, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return _new_product(grads[0], b.mT, ctx.scale), _new_product(a.mT, grads[0], ctx.scale), None


def _new_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    made = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    _multiply(a, b, made, scale=scale)
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


def _multiply(
    a: Tensor, b: Tensor, into: Tensor, *, scale: float = 1.0, bias: Tensor | None = None, add: bool = False
) -> None:
    """Write (or add) scale a b + bias to `into`: a [m, k], b [k, n], bias [n], into [m, n], all with any strides. All
    three may have a batch in front. Nothing is recorded.

    Raises ValueError where shapes, devices or the factors' dtypes do not fit.
    """
    _assert_fit(a, b, into, bias)
    library = _kernel(a.dtype, choice())
    takes = into.dtype in (a.dtype, torch.float32) and (into.stride(-1) == 1 or into.shape[-1] == 1)
    if library is not None and takes and (bias is None or bias.dtype == a.dtype):
        _call(library, a, b, into, scale, bias, add)
    elif a.dim() == 3:
        for left, right, part in zip(a, b, into, strict=True):
            _multiply_widened(left, right, part, scale, bias, add)
    else:
        _multiply_widened(a, b, into, scale, bias, add)


def _assert_fit(a: Tensor, b: Tensor, into: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError for what the kernel, which knows addresses only, would read or write beside a tensor."""
    fits = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype
    fits = fits and into.shape == (*a.shape[:-1], b.shape[-1]) and (bias is None or bias.shape == b.shape[-1:])
    if not (fits and a.is_cpu and b.is_cpu and into.is_cpu and (bias is None or bias.is_cpu)):
        added = "" if bias is None else f" with a bias {_words(bias)}"
        raise ValueError(f"{_words(a)} times {_words(b)}{added} does not fit {_words(into)}")


def _words(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}" + f" on {x.device}" * (not x.is_cpu)


def _call(library: Library, a: Tensor, b: Tensor, into: Tensor, scale: float, bias: Tensor | None, add: bool) -> None:
    """The kernel, which needs a stride of 1 in each factor, and in a row of `into`."""
    a = a if 1 in a.stride()[-2:] else a.contiguous()
    b = b if 1 in b.stride()[-2:] else b.contiguous()
    bias = None if bias is None else bias.contiguous()
    *batch, m, k = a.shape
    still = () if batch else (0,)  # elements from one matrix of the batch to the next
    strides = (*still, *a.stride(), *still, *b.stride(), *still, *into.stride())
    wide = int(into.dtype == torch.float32)
    numbers = (*(batch or (1,)), m, b.shape[-1], k, *strides)
    library.call(f"product_{suffix(a.dtype)}", numbers, a, b, bias, into, float(scale), int(add), wide)


@torch.no_grad()
def _multiply_widened(a: Tensor, b: Tensor, into: Tensor, scale: float, bias: Tensor | None, add: bool) -> None:
    """The plain body of `_multiply`, without a batch."""
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
