"""FP8 copies of 16-bit matrices, and products of such copies.

Formats: e4m3 (3 bits of mantissa, up to 448) for activations and weights, e5m2 (2 bits, up to 57344) for gradients, as
in Micikevicius et al. 2022, arXiv:2209.05433. A copy holds x * scale; its product is multiplied by the inverses of both
scales.

Scales are powers of two. Multiplying by one is exact, so that an element is rounded once, and a largest value that
differs in its last bits (another order of summation on another layout) gives the same scale. What it costs is up to one
of the 17 binades (e4m3) between the largest number and the smallest; precision it does not cost.

Overflow is never hidden: casts saturate, so an infinity would become 448. A matrix that holds any number that is not
finite has NaN as its inverse, and every element of its products is NaN: the step's norm sees it, and the step is
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.known import disagreement, known
from fused_ops.linear import put
from fused_ops.native.binding import Library
from fused_ops.native.library import kernels, suffix

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST: Mapping[torch.dtype, int] = MappingProxyType({E4M3: 8, E5M2: 15})
"""The largest number of both formats is 1.75 times two to this."""
_INFINITE = float("inf")
_ALLOWED = 1e-2
"""How far a product of FP8 copies may be off float64, in the norm: tensor cores sum in fewer bits than fp32 has."""
_CLEAR = 256
"""Bytes at multiples of which a result may be written in place: cuBLASLt is told of no smaller alignment."""


class Quantised(NamedTuple):
    """A matrix [m, k] in FP8: its rows, its columns [k, m] (None: not made), and 0-dim fp32 1 / scale, NaN where it was
    not finite.
    """

    values: Tensor
    transposed: Tensor | None
    inverse: Tensor


def measure(x: Tensor) -> Tensor:
    """Largest absolute value of x [m, k], 0-dim fp32; NaN where x holds one."""
    library = _library(x)
    if library is not None:
        largest = x.new_empty((), dtype=torch.float32)
        library.call(f"largest_{suffix(x.dtype)}", *x.shape, x.stride(0), x, largest)
        return largest
    return _measured(x)


def _measured(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, _INFINITE, dtype=torch.float32)


def scale_of(amax: Tensor, largest: int | Tensor) -> Tensor:
    """The largest power of two that keeps amax (fp32, any shape, not negative) within the format; 2^126 for 0.

    largest: of `LARGEST`, or an int32 tensor of them. Arithmetic on exponents: the same bits on every device, compiled
    or not.
    """
    # Adding all but the top two bits of a mantissa carries into the exponent where the mantissa is more than 1.75.
    exponent = (amax.view(torch.int32) + 0x1FFFFF) >> 23
    return ((254 + largest - exponent).clamp(1, 253) << 23).view(torch.float32)


def inverse_of(scale: Tensor, amax: Tensor) -> Tensor:
    """1 / scale of a power of two; NaN where amax is not finite."""
    inverse = (0x7F000000 - scale.view(torch.int32)).view(torch.float32)
    return torch.where(torch.isfinite(amax), inverse, torch.full_like(inverse, float("nan")))


def empty(x: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
    """Memory for a copy of x [m, k]."""
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
    # bf16 has fp32's exponents: times a power of two it is exact, in half the bytes. fp16 would leave its range.
    scaled = (x if x.dtype == torch.bfloat16 else x.float()) * scale
    into.values.copy_(scaled.clamp(-limit, limit))
    if into.transposed is not None:
        into.transposed.copy_(into.values.t())
    into.inverse.copy_(inverse_of(scale, amax))
    return amax


# Compiled bodies of one function share a limit of eight shapes, beyond which torch.compile gives up. So each role is a
# function of its own: a block has at most four shapes of inputs, of weights, and of gradients.
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
    """Write the FP8 copy of x [m, k] (bf16, fp16 or fp32) and its transpose; returns x's largest absolute value, 0-dim
    fp32.

    scale     0-dim fp32, a power of two; None: the one of this matrix
    amax      `measure(x)`, where it is known
    compiled  where there is no kernel: through torch.compile, which makes one or two passes of it
    Elements beyond the format's largest number become that; see above for those that are not finite.
    """
    x = x.detach()
    library = _library(x)
    if library is not None:
        return _fill_on_device(library, x, scale, amax, into)
    return (_compiled(role) if compiled else _FILLS[role])(x, scale, amax, into)


def _library(x: Tensor) -> Library | None:
    """The kernels, if they take x: on a GPU, 16-bit, of rows whose elements are neighbours."""
    if x.dtype == torch.float32 or not x.numel() or (x.stride(1) != 1 and x.shape[1] > 1):
        return None
    library = kernels(x)
    return library if library is not None and library.on_device else None


def _fill_on_device(library: Library, x: Tensor, scale: Tensor | None, amax: Tensor | None, into: Quantised) -> Tensor:
    """`_fill` in one reading, in two where the scale has to be found first."""
    numbers = [x.new_empty((), dtype=torch.float32) if number is None else number for number in (amax, scale)]
    name = f"quantise_{'e4m3' if into.values.dtype == E4M3 else 'e5m2'}_{suffix(x.dtype)}"
    copies = into.inverse, into.values, into.transposed
    library.call(name, *x.shape, x.stride(0), x, *numbers, *copies, int(scale is None), int(amax is None))
    return numbers[0]


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
    """a b^T + bias in `dtype`, [m, n] of FP8 a [m, k] and b [n, k], both contiguous, not both e5m2; k and n multiples
    of 16.

    bias  [n], of `dtype`, which must be 16-bit then
    fast  summed within the tensor core in fewer bits than fp32's, as Transformer Engine does in forward, and only there
    """
    if bias is not None and bias.data_ptr() % _CLEAR:
        bias = bias.clone()
    return torch._scaled_mm(
        a, b.t(), scale_a=a_inverse, scale_b=b_inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast
    )


@torch.no_grad()
def add_weight_gradient(
    grad: Tensor, x: Tensor, grad_inverse: Tensor, x_inverse: Tensor, into: Tensor, add: bool
) -> None:
    """The product of grad^T [n, m] (e5m2) and x^T [k, m] (e4m3), written into (or added to) `into` [n, k].

    torch's scaled product cannot add to what is there: what is added is made in `into`'s dtype (fp32 of a gradient's
    sum) and added in a pass of its own. That rounds as an accumulating product would, and moves 16 bytes an element,
    little beside m multiplications.
    """
    in_place = not add and into.is_contiguous() and not into.is_meta  # torch has no meta kernel of it
    if in_place and into.data_ptr() % _CLEAR == 0:
        torch._scaled_mm(grad, x.t(), scale_a=grad_inverse, scale_b=x_inverse, out_dtype=into.dtype, out=into)
        return
    put(product(grad, x, grad_inverse, x_inverse, into.dtype), into, add)


def why_not(kind: str) -> str | None:
    """Why this machine has no FP8 products on this kind of device; None: it has."""
    if kind != "cuda":
        return refused(kind)
    if torch.version.hip is not None:
        return "this torch is built for ROCm, whose FP8 formats are others"
    major, minor = torch.cuda.get_device_capability(0)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(0)
        return (
            f"{name} (compute capability {major}.{minor}) has no FP8 units; they came with 8.9 (Ada) and 9.0 (Hopper)"
        )
    return None


def refused(kind: str) -> str | None:
    """Why small products of known numbers fail, or give others than float64 does: one as in forward and one as in
    backward.
    """
    scales = torch.tensor([0.5, 0.25], device=kind)
    b = known(32, 48, seed=1, dtype=torch.float32, device=kind).to(E4M3)
    bias = known(32, seed=2, dtype=torch.bfloat16, device=kind)
    for narrow, dtype, summand in ((E4M3, torch.bfloat16, bias), (E5M2, torch.float32, None)):
        a = known(16, 48, seed=3, dtype=torch.float32, device=kind).to(narrow)
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
