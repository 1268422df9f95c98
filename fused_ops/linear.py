"""The three products of a linear layer.

m rows (tokens), k inputs, n outputs; activations [..., k] and [..., n], weight [n, k]. 16-bit products are summed in
fp32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.known import disagreement, known_numbers
from fused_ops.native.library import Library, kernels, matrix_kernels, suffix
from fused_ops.native.stand_in import META
from fused_ops.products import add_row_product, input_product, own_products, weight_product

FEW = 16
"""Up to this many rows the CPU kernel for few rows is used. There it is not slower than torch's product, which is made
for many rows.
"""
_ALLOWED, _WIDENED = 1e-6, 1e-4
"""Largest relative errors in trials, in the norm: of the kernels here, which sum in fp32, and of torch's products with
a wider result. Products that are rounded to fp16 have an error of 2e-4.
"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: x [..., k], weight [n, k], bias [n] or None -> [..., n]. 16-bit sums are fp32."""
    if x.device.type != "cpu" or not x.numel() or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    n, k = weight.shape
    fits = weight.is_contiguous() and x.shape[-1] == k and (bias is None or bias.shape == (n,))
    library = (kernels(x, weight) if bias is None else kernels(x, weight, bias)) if fits else None
    if library is not None and not library.on_device and x.numel() <= FEW * k:
        y = x.new_empty((*x.shape[:-1], n))
        added = None if bias is None else bias.contiguous()  # the kernel knows its address only
        library.call(f"few_rows_{suffix(x.dtype)}", x.numel() // k, k, n, y, x.contiguous(), weight, added)
        return y
    if own_products(x, n, k):
        return weight_product(x, weight, bias)
    if library is not None and not library.on_device and bias is not None and _adds_bias(x.dtype):
        return _biased(x.contiguous(), weight, bias.contiguous())
    return F.linear(x, weight, bias)


def linear_into(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write x weight^T to `out` [m, n], for x [m, k] and weight [n, k], without autograd."""
    return weight_product(x, weight, out=out) if own_products(x, *weight.shape) else torch.mm(x, weight.t(), out=out)


def _biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear` on the CPU by oneDNN, which adds the bias to the fp32 sums before it rounds them.

    F.linear would first write the bias into the result, in another pass, and the product would read that again. All
    three are contiguous: the op takes a bias of other strides by its address.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@cache
def _adds_bias(dtype: torch.dtype) -> bool:
    """Whether `_biased` works for this 16-bit dtype on this machine and rounds once. It is tried once in a process.

    fp32 uses torch's product: oneDNN's fp32 sums are less exact, and it is slower for small products.
    """
    if dtype.itemsize != 2:
        return False
    x, weight, bias = (
        known_numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(77, 45), (37, 45), (37,)])
    )
    exact = x.double() @ weight.double().t() + bias.double()
    try:
        found = _biased(x, weight, bias)
    except (AttributeError, RuntimeError):  # torch has no oneDNN or not this op, or the processor does not support it
        return False
    # Only elements close to a tie may be rounded differently from the exact ones.
    return found.dtype == dtype and not disagreement(found, exact.to(dtype), torch.finfo(dtype).eps / 16)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight: grad [..., n], weight [n, k] -> [..., k], contiguous, in a storage of its own."""
    return input_product(grad, weight) if own_products(grad, *weight.shape) else torch.matmul(grad, weight)


@torch.no_grad()
def add_weight_gradient(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """Write (or add) grad^T x, for grad [m, n] and x [m, k], to `into` [n, k], whose dtype may be wider.

    For 16-bit factors and an fp32 `into` the product is not rounded to 16 bits, if there is a kernel for this processor
    or the device has a product with a wider result. On CUDA this is one cuBLAS product that accumulates into `into`.
    """
    if own_products(grad, *into.shape):
        add_row_product(grad, x, into, add)
        return
    library = _library(grad, x, into)
    if library is not None:
        shape = grad.shape[0], grad.shape[1], x.shape[1]
        library.call(
            f"weight_gradient_{suffix(grad.dtype)}", *shape, grad, grad.stride(0), x, x.stride(0), into, int(add)
        )
        return
    if into.dtype != grad.dtype:
        _widened(grad, x, into, add)
    elif add:
        into.addmm_(grad.t(), x)
    else:
        torch.mm(grad.t(), x, out=into)


def write_or_add(made: Tensor, into: Tensor, add: bool) -> None:
    """Write (or add) a gradient to `into`, which has its shape, rounded to `into`'s dtype."""
    _ = into.add_(made) if add else into.copy_(made)


def _widened(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """The product of factors that are narrower than `into`, rounded to their dtype only if there is no other way."""
    device = into.device.type
    if add and into.is_contiguous() and _widens(device, grad.dtype, into.dtype, True):
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, out=into)
    elif not _widens(device, grad.dtype, into.dtype, False):
        write_or_add(torch.mm(grad.t(), x), into, add)
    elif add or not into.is_contiguous():
        write_or_add(torch.mm(grad.t(), x, out_dtype=into.dtype), into, add)
    else:
        torch.mm(grad.t(), x, out_dtype=into.dtype, out=into)


@cache
def _widens(device: str, narrow: torch.dtype, wide: torch.dtype, adds: bool) -> bool:
    """Whether this torch multiplies narrow factors into a wide result on the device; adds: whether it can accumulate
    too.

    It is tried once with small factors, and not on the meta device, where nothing has numbers. torch has these
    overloads for CUDA only, older versions refuse a wide summand, and a version that rounded the product first would be
    useless here.
    """
    if device == META:
        return True
    left, right = (known_numbers(40, width, seed=width, dtype=narrow, device=device) for width in (24, 16))
    result = known_numbers(24, 16, seed=1, dtype=wide, device=device)
    exact = left.double().t() @ right.double()
    try:
        if adds:
            exact += result
            torch.addmm(result, left.t(), right, out_dtype=wide, out=result)
        else:
            torch.mm(left.t(), right, out_dtype=wide, out=result)
    except (RuntimeError, TypeError):
        return False
    return not disagreement(result, exact, _WIDENED)


@torch.no_grad()
def add_bias_gradient(grad: Tensor, into: Tensor, add: bool) -> None:
    """Write (or add) the sum of grad [m, n] over its rows to `into` [n]. It is summed in fp32 (fp64 for fp64)."""
    library = kernels(grad) if grad.numel() and grad.stride(1) == 1 else None
    if library is None:
        total = grad.sum(0, dtype=opmath_dtype(grad.dtype))
    else:
        total = grad.new_empty(grad.shape[1], dtype=torch.float32)
        library.call(f"column_sums_{suffix(grad.dtype)}", *grad.shape, grad.stride(0), grad, total)
    write_or_add(total, into, add)


def _library(grad: Tensor, x: Tensor, into: Tensor) -> Library | None:
    """The kernel, if it takes these tensors: 16-bit factors with contiguous rows, not empty, and an fp32 result."""
    if (
        into.dtype != torch.float32
        or grad.dtype == torch.float32
        or not grad.numel()
        or not x.numel()
        or not into.is_contiguous()
    ):
        return None
    library = matrix_kernels(grad, x)
    rows = grad.stride(1) == 1 and x.stride(1) == 1
    tried = grad.is_meta or (library is not None and not refusal(library, grad.dtype))  # nothing to try without numbers
    return library if rows and tried else None


@cache
def refusal(library: Library, dtype: torch.dtype) -> str:
    """Why the kernel is not used for a dtype on this machine, in a line; empty if its results agree with float64.

    It is tried once in a process, with strided tensors and sizes that are no multiples of a block. The kernel uses
    matrix products of torch's library, which chooses instructions by the processor.
    """
    m, n, k = 77, 37, 45
    grad, x = (known_numbers(m, width + 3, seed=width, dtype=dtype)[:, 2 : width + 2] for width in (n, k))
    before = known_numbers(n, k, seed=1, dtype=torch.float32)
    exact = grad.double().t() @ x.double()
    for add in (False, True):
        into = before.clone()
        library.call(f"weight_gradient_{suffix(dtype)}", m, n, k, grad, grad.stride(0), x, x.stride(0), into, int(add))
        if off := disagreement(into, exact + before.double() if add else exact, _ALLOWED):
            return f"{off} on this machine"
    return ""
