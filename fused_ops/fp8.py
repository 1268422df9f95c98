"""FP8 copies of 16-bit matrices, and products of such copies.

Formats: e4m3 (3 bits of mantissa, up to 448) for activations and weights, e5m2 (2 bits, up to 57344) for gradients
(Micikevicius et al. 2022, arXiv:2209.05433). A copy has the values x * scale. A product is multiplied by the inverses
of both scales.

Scales are powers of two. Multiplication by them is exact, so each element is rounded once. An amax that differs in its
last bits (by another order of summation on another layout) gives the same scale. The price is up to one of the 17
binades of e4m3's range; precision is not lost.

Casts saturate, so an infinity would become 448. To keep overflow visible, a matrix with any number that is not finite
has NaN as its inverse scale. All elements of its products are then NaN, and so is the gradient norm: the step is
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops.known import disagreement, known_numbers
from fused_ops.linear import write_or_add
from fused_ops.native.binding import Library
from fused_ops.native.library import kernels, kernels_on, suffix

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST: Mapping[torch.dtype, int] = MappingProxyType({E4M3: 8, E5M2: 15})
"""Format -> e such that its largest number is 1.75 * 2^e."""
_INFINITE = float("inf")
_ALLOWED = 1e-2
"""Largest relative error of an FP8 product in the trial, in the norm. Tensor cores sum in fewer bits than fp32's."""
_CLEAR = 256
"""Alignment in bytes that a result and a bias must have, since torch assumes it when it calls cuBLASLt."""
_SCALE_CLEAR = 16
"""Alignment in bytes of an inverse scale. cuBLASLt of CUDA 13 refuses a product whose scale lies elsewhere."""


class Quantised(NamedTuple):
    """A matrix in FP8.

    values      [m, k]
    transposed  [k, m], contiguous; None if it was not made
    inverse     0-dim fp32: 1 / scale; NaN if the matrix was not finite
    """

    values: Tensor
    transposed: Tensor | None
    inverse: Tensor


def measure(x: Tensor) -> Tensor:
    """Largest absolute value of x [m, k], 0-dim fp32; NaN if x has a NaN."""
    library = _library(x)
    if library is not None:
        largest = x.new_empty((), dtype=torch.float32)
        library.call(f"largest_{suffix(x.dtype)}", *x.shape, x.stride(0), x, largest)
        return largest
    return _measured(x)


def _measured(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, _INFINITE, dtype=torch.float32)


def scale_of(amax: Tensor, largest: int | Tensor) -> Tensor:
    """The largest power of two by which amax (fp32, any shape, not negative) stays within the format; 2^126 for 0.

    largest: a value of `LARGEST`, or an int32 tensor of them. It is integer arithmetic on exponents, so the bits are
    the same on every device, compiled or not.
    """
    # This addition carries into the exponent if the mantissa is more than 1.75.
    exponent = (amax.view(torch.int32) + 0x1FFFFF) >> 23
    return ((254 + largest - exponent).clamp(1, 253) << 23).view(torch.float32)


def inverse_of(scale: Tensor, amax: Tensor) -> Tensor:
    """1 / scale, for a scale that is a power of two; NaN where amax is not finite."""
    inverse = (0x7F000000 - scale.view(torch.int32)).view(torch.float32)
    return torch.where(torch.isfinite(amax), inverse, torch.full_like(inverse, float("nan")))


def empty(x: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
    """Uninitialised memory for an FP8 copy of x [m, k]."""
    rows, columns = x.shape
    values = torch.empty((rows, columns), dtype=dtype, device=x.device)
    other = torch.empty((columns, rows), dtype=dtype, device=x.device) if transposed else None
    return Quantised(values, other, torch.empty((), dtype=torch.float32, device=x.device))


def _fill(x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    if amax is None:
        amax = _measured(x)
    if scale is None:
        scale = scale_of(amax, LARGEST[into.values.dtype])
    limit = torch.finfo(into.values.dtype).max
    # bf16 has fp32's exponents: its product with a power of two is exact, in half the bytes. fp16 could overflow.
    scaled = (x if x.dtype == torch.bfloat16 else x.float()) * scale
    into.values.copy_(scaled.clamp(-limit, limit))
    if into.transposed is not None:
        into.transposed.copy_(into.values.t())
    into.inverse.copy_(inverse_of(scale, amax))
    return amax


# torch.compile compiles one function for eight shapes at most. So each role has a function of its own: a block has at
# most four shapes of inputs, of weights, and of gradients.
def _fill_input(x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    return _fill(x, scale, amax, into)


def _fill_weight(x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    return _fill(x, scale, amax, into)


def _fill_gradient(x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    return _fill(x, scale, amax, into)


_FILLS: Mapping[str, Callable[[Tensor, Tensor | None, Tensor | None, Quantised], Tensor]] = MappingProxyType(
    {"input": _fill_input, "weight": _fill_weight, "gradient": _fill_gradient}
)
ROLES = tuple(_FILLS)


@cache
def _compiled(role: str) -> Callable[[Tensor, Tensor | None, Tensor | None, Quantised], Tensor]:
    return torch.compile(_FILLS[role], dynamic=False, fullgraph=True)


@torch.no_grad()
def fill(
    role: str,
    x: Tensor,
    into: Quantised,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """Write the FP8 copy of x [m, k] (bf16, fp16 or fp32) and its transpose; return x's amax, 0-dim fp32.

    role      input, weight or gradient
    into      memory of `empty`
    scale     0-dim fp32, a power of two; None: computed from amax
    amax      `measure(x)` if it is known
    compiled  use torch.compile if there is no kernel; it makes one or two passes

    Elements beyond the format's largest number saturate. See above for elements that are not finite.
    """
    x = x.detach()
    library = _library(x)
    if library is not None:
        return _fill_on_device(library, x, scale, amax, into)
    return (_compiled(role) if compiled else _FILLS[role])(x, scale, amax, into)


def _library(x: Tensor) -> Library | None:
    """The kernels, if they take x: on a GPU, 16-bit, with contiguous rows."""
    if x.dtype == torch.float32 or not x.numel() or (x.stride(1) != 1 and x.shape[1] > 1):
        return None
    library = kernels(x)
    return library if library is not None and library.on_device else None


def _fill_on_device(library: Library, x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    """`_fill` in one pass over x, or in two if the scale has to be computed first."""
    numbers = [x.new_empty((), dtype=torch.float32) if number is None else number for number in (amax, scale)]
    name = f"quantise_{'e4m3' if into.values.dtype == E4M3 else 'e5m2'}_{suffix(x.dtype)}"
    copies = into.inverse, into.values, into.transposed
    library.call(name, *x.shape, x.stride(0), x, *numbers, *copies, int(scale is None), int(amax is None))
    return numbers[0]


def transpose(values: Tensor) -> Tensor:
    """FP8 values [m, k] as [k, m], contiguous, where they were not cast by columns too: what other ranks have sent."""
    library = kernels_on(values.device)
    if library is None or not library.on_device or not values.is_contiguous():
        return values.t().contiguous()
    result = values.new_empty(values.shape[::-1])
    library.call("transpose_bytes", *values.shape, values, result)
    return result


def product(
    a: Tensor,
    b: Tensor,
    a_inverse: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """a b^T + bias, [m, n] of `dtype`, for FP8 a [m, k] and b [n, k], contiguous and not both e5m2.

    k and n are multiples of 16.

    a_inverse  0-dim fp32: 1 / scale of a
    b_inverse  0-dim fp32: 1 / scale of b
    bias       [n], of `dtype`, which must then be 16-bit
    fast       sum in fewer bits than fp32's within the tensor core, as Transformer Engine does in forward only
    """
    if bias is not None:
        bias = _aligned(bias, _CLEAR)
    scale_a, scale_b = _aligned(a_inverse, _SCALE_CLEAR), _aligned(b_inverse, _SCALE_CLEAR)
    named = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
    return _scaled_mm(a, b.t(), named)


def _scaled_mm(a: Tensor, b: Tensor, named: dict[str, Any]) -> Tensor:
    """torch's scaled product; on a CPU the one that widens to fp32.

    With AMX torch would call oneDNN, which has only a plain loop for two matrices in e4m3: half a second for [256, 64]
    by [64, 192].
    """
    if a.device.type != "cpu":
        return torch._scaled_mm(a, b, **named)
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return torch._scaled_mm(a, b, **named)
    finally:
        torch._C._set_mkldnn_enabled(was)


def _aligned(x: Tensor, size: int) -> Tensor:
    """x, or a copy of it if its address is no multiple of `size` bytes. A tensor without memory (meta) is as it is."""
    return x.clone() if not x.is_meta and x.data_ptr() % size else x


@torch.no_grad()
def add_weight_gradient(
    grad: Tensor, x: Tensor, grad_inverse: Tensor, x_inverse: Tensor, into: Tensor, add: bool
) -> None:
    """The weight gradient from transposed copies grad [n, m] (e5m2) and x [k, m] (e4m3): write or add it to `into` [n,
    k].

    torch's scaled product cannot accumulate. If `add`, the product is made in `into`'s dtype (fp32 for gradient
    buffers) and added in another pass. That rounds as an accumulating product would. It moves 16 bytes per element,
    little compared with m multiplications.
    """
    in_place = not add and into.is_contiguous() and not into.is_meta  # torch has no meta kernel for `out`
    if in_place and into.data_ptr() % _CLEAR == 0:
        scale_a, scale_b = _aligned(grad_inverse, _SCALE_CLEAR), _aligned(x_inverse, _SCALE_CLEAR)
        named = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": into.dtype, "out": into}
        _scaled_mm(grad, x.t(), named)
        return
    write_or_add(product(grad, x, grad_inverse, x_inverse, into.dtype), into, add)


def unavailable_reason(kind: str) -> str | None:
    """Why this machine has no FP8 products on this kind of device; None if it has."""
    if kind != "cuda":
        return refusal(kind)
    if torch.version.hip is not None:
        return "this torch is built for ROCm, whose FP8 formats are others"
    major, minor = torch.cuda.get_device_capability(0)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(0)
        return (
            f"{name} (compute capability {major}.{minor}) has no FP8 units; they came with 8.9 (Ada) and 9.0 (Hopper)"
        )
    return None


def refusal(kind: str) -> str | None:
    """Why FP8 products fail or differ from float64 on this kind of device; None if they agree.

    It tries two small products of known numbers, one as in forward and one as in backward.
    """
    scales = torch.tensor([0.5, 0.25], device=kind)
    b = known_numbers(32, 48, seed=1, dtype=torch.float32, device=kind).to(E4M3)
    bias = known_numbers(32, seed=2, dtype=torch.bfloat16, device=kind)
    for narrow, dtype, summand in ((E4M3, torch.bfloat16, bias), (E5M2, torch.float32, None)):
        a = known_numbers(16, 48, seed=3, dtype=torch.float32, device=kind).to(narrow)
        exact = a.double() @ b.double().t() / 8 + (0.0 if summand is None else summand.double())
        try:
            off = disagreement(product(a, b, scales[0], scales[1], dtype, summand), exact, _ALLOWED)
        except (RuntimeError, AttributeError, TypeError) as error:
            return (
                f"this torch ({torch.__version__}) has no FP8 products on {kind}: {str(error).strip().splitlines()[0]}"
            )
        if off:
            return f"this torch ({torch.__version__}) has wrong FP8 products on {kind}: {off}"
    return None
