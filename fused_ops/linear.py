"""The three products of a linear layer.

m rows (tokens), k inputs, n outputs; activations [..., k] and [..., n], weight [n, k]. 16-bit products are summed in
fp32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import wide
from fused_ops.known import disagreement, known
from fused_ops.native.library import Library, kernels, matrix_kernels, suffix

FEW = 16
"""Rows up to which the CPU's own kernel multiplies; there it is no slower than torch's product, which is made for many:
with eight fp32 rows on two threads that reads the weight at 1.3 GB/s.
"""
_ALLOWED, _WIDENED = 1e-6, 1e-4
"""How far our products, summed in fp32, and torch's widened ones may be off float64, in the norm; rounded to fp16 they
are by 2e-4.
"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: [..., k] -> [..., n], rounded once."""
    n, k = weight.shape
    few = x.numel() <= FEW * k
    if (
        x.device.type == "cpu"
        and x.numel()
        and (few or bias is not None)
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
    ):
        library = kernels(x, weight) if bias is None else kernels(x, weight, bias)
        if library is not None and not library.on_device:
            if few:
                y = x.new_empty((*x.shape[:-1], n))
                library.call(f"few_rows_{suffix(x.dtype)}", x.numel() // k, k, n, y, x.contiguous(), weight, bias)
                return y
            if bias is not None and _adds_bias(x.dtype):
                return _biased(x.contiguous(), weight, bias)
    return F.linear(x, weight, bias)


def _biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear` on the CPU by oneDNN, which adds the bias to the sums before it rounds them. F.linear first spreads the
    bias over the result, in a pass of its own, and has the product read that again.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@cache
def _adds_bias(dtype: torch.dtype) -> bool:
    """Whether `_biased` multiplies 16-bit numbers on this machine, and rounds once: tried once in a process, with odd
    sizes.

    fp32 stays with torch's product: oneDNN's sums are less exact there, and it is slower for small ones.
    """
    if dtype.itemsize != 2:
        return False
    x, weight, bias = (known(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(77, 45), (37, 45), (37,)]))
    exact = x.double() @ weight.double().t() + bias.double()
    try:
        found = _biased(x, weight, bias)
    except (AttributeError, RuntimeError):  # a torch without oneDNN or this op of it; a processor without the product
        return False
    # Only elements next to a tie may be rounded otherwise than the exact ones.
    return found.dtype == dtype and not disagreement(found, exact.to(dtype), torch.finfo(dtype).eps / 16)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad weight: [..., n] -> [..., k], contiguous and of its own storage."""
    return torch.matmul(grad, weight)


@torch.no_grad()
def add_weight_gradient(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """grad^T x, [m, n] and [m, k], written into (or added to) `into` [n, k], whose dtype may be wider than theirs.

    16-bit factors and an fp32 `into`: no 16-bit product comes between, where the processor has a kernel for it, or the
    device a product that widens. On CUDA that is one product of the library's, which adds to the sum where it lies.
    """
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


def put(made: Tensor, into: Tensor, add: bool) -> None:
    """A gradient written into, or added to, `into` of its shape; rounded to its dtype."""
    _ = into.add_(made) if add else into.copy_(made)


def _widened(grad: Tensor, x: Tensor, into: Tensor, add: bool) -> None:
    """The product of narrower factors; rounded to their dtype on the way only where nothing else can be had."""
    device = into.device.type
    if add and into.is_contiguous() and _widens(device, grad.dtype, into.dtype, True):
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, out=into)
    elif not _widens(device, grad.dtype, into.dtype, False):
        put(torch.mm(grad.t(), x), into, add)
    elif add or not into.is_contiguous():
        put(torch.mm(grad.t(), x, out_dtype=into.dtype), into, add)
    else:
        torch.mm(grad.t(), x, out_dtype=into.dtype, out=into)


@cache
def _widens(device: str, narrow: torch.dtype, wide: torch.dtype, adds: bool) -> bool:
    """Whether this torch multiplies narrow factors into a wide result on the device; adds: and adds it to what is
    there.

    Tried once, with small factors whose product is known: torch has these overloads for CUDA only, its first ones
    refused a wide summand, and one that rounds the product on the way would be no better than the product that is not
    widened.
    """
    left, right = (known(40, width, seed=width, dtype=narrow, device=device) for width in (24, 16))
    result = known(24, 16, seed=1, dtype=wide, device=device)
    exact = left.double().t() @ right.double()
    try:
        if adds:
            exact += result
            torch.addmm(result, left.t(), right, out_dtype=wide, out=result)
        else:
            torch.mm(left.t(), right, out_dtype=wide, out=result)
    except (RuntimeError, TypeError):
        return False
    return result.is_meta or not disagreement(result, exact, _WIDENED)  # a meta tensor has no numbers


@torch.no_grad()
def add_bias_gradient(grad: Tensor, into: Tensor, add: bool) -> None:
    """The sum of grad [m, n] over its rows, written into (or added to) `into` [n]; summed in fp32 (fp64 of fp64)."""
    library = kernels(grad) if grad.numel() and grad.stride(1) == 1 else None
    if library is None:
        total = grad.sum(0, dtype=wide(grad.dtype))
    else:
        total = grad.new_empty(grad.shape[1], dtype=torch.float32)
        library.call(f"column_sums_{suffix(grad.dtype)}", *grad.shape, grad.stride(0), grad, total)
    put(total, into, add)


def _library(grad: Tensor, x: Tensor, into: Tensor) -> Library | None:
    """The kernel, if it takes these: 16-bit factors whose rows are contiguous, at least one of them, and an fp32
    result.
    """
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
    return library if library is not None and rows and not refusal(library, grad.dtype) else None


@cache
def refusal(library: Library, dtype: torch.dtype) -> str:
    """Why the kernel is not used for a dtype on this machine, in a line; empty: written and added, it gives the numbers
    that float64 does.

    Tried once in a process, with columns of wider tensors and with sizes that are no multiple of a block. Its products
    are borrowed of torch, which chooses instructions by the processor.
    """
    m, n, k = 77, 37, 45
    grad, x = (known(m, width + 3, seed=width, dtype=dtype)[:, 2 : width + 2] for width in (n, k))
    before = known(n, k, seed=1, dtype=torch.float32)
    exact = grad.double().t() @ x.double()
    for add in (False, True):
        into = before.clone()
        library.call(f"weight_gradient_{suffix(dtype)}", m, n, k, grad, grad.stride(0), x, x.stride(0), into, int(add))
        if off := disagreement(into, exact + before.double() if add else exact, _ALLOWED):
            return f"{off} on this machine"
    return ""
