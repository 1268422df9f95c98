"""Blocks of int8 or int4 numbers with one scale each, for tensors that travel between ranks.

They are the blocks of ZeRO++ (Wang et al. 2023, arXiv:2306.10209): symmetric, one fp32 scale for 256 neighbours,
rounded to nearest. The largest absolute value of a block becomes the largest code, 127 or 7. So what a block loses of
an element is at most half of its scale, which is its largest value over 254 or over 14.

A row of n elements is packed into bytes of one tensor, so that it travels as one message:

codes    int8: one byte an element. int4: byte j of each 16 has element j of its 32 in the lower half and element j + 16
         in the upper half, each plus 8. Codes end at a multiple of 16 bytes; what is behind the last element is 0.
scales   fp32, one for each block, the last of which may be shorter. They end at a multiple of 16 bytes too.

Overflow stays visible: a block with an infinity or NaN has NaN as its scale, so all its elements come back as NaN, and
the step is skipped. A fp64 number beyond fp32's range counts as an infinity. Every finite fp32 number comes back
finite. Scales are normal numbers: a block whose values are all below 2^-127 comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import opmath_dtype, rows_of
from fused_ops.native.library import Library, kernels, suffix

BLOCK = 256
"""Elements that share a scale."""
LARGEST_CODE: Mapping[int, int] = MappingProxyType({8: 127, 4: 7})
"""Bits of a code -> the largest code."""
_ALIGNMENT = 16
"""Codes and scales end at a multiple of so many bytes: a card reads that many at once."""
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes of a row of `numel` elements."""
    return _aligned(-(-numel * bits // 8))


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of a row of `numel` elements: bits/8 for each element and 4 for each block, both up to a multiple of 16."""
    return code_bytes(numel, bits) + _aligned(4 * -(-numel // BLOCK))


def bytes_each(bits: int) -> float:
    """Bytes of an element of a long row."""
    return bits / 8 + 4 / BLOCK


@torch.no_grad()
def quantise(x: Tensor, bits: int, error: Tensor | None = None) -> Tensor:
    """The rows of x [rows, n], contiguous and of a floating dtype, packed: uint8 [rows, packed_bytes(n, bits)].

    bits   8 or 4
    error  fp32 [rows, n], contiguous: it is added to x first, and then gets what quantisation has lost of the sum
           (error feedback: Seide et al. 2014, Interspeech). A block that is not finite leaves its error as it was, so
           error is always finite
    """
    rows, n = x.shape
    packed = torch.empty((rows, packed_bytes(n, bits)), dtype=torch.uint8, device=x.device)
    library = kernels(x) if x.is_contiguous() else None
    if library is not None:
        library.call(f"quantise_int{bits}_{suffix(x.dtype)}", rows, n, x, error, packed)
        return packed
    packed[:, code_bytes(n, bits) :] = 0
    for part, codes, scales in _pieces(packed, n, bits):
        own = None if error is None else error[:, part]
        _quantise_piece(x[:, part], bits, own, codes, scales)
    return packed


def dequantise(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """The rows of `packed` [rows, bytes] as numbers in `out` [rows, n], contiguous and of a floating dtype: `out`.

    Code times scale is computed in fp32 (fp64 for an `out` in fp64) and rounded to the dtype of `out`: the same bits on
    every machine.
    """
    return _add_up(packed.unsqueeze(1), bits, out)


def sum_dequantised(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """The sum of the rows of `packed` [rows, bytes] in `out` [n], contiguous and of a floating dtype: `out`.

    Rows are added up in their order, in fp32 (fp64 for an `out` in fp64), and the sum is rounded once.
    """
    _add_up(packed.unsqueeze(0), bits, out.view(1, -1))
    return out


@torch.no_grad()
def _add_up(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """out [rows, n] from packed [rows, parts, bytes], contiguous: the sums over the parts."""
    rows, n = out.shape
    parts = packed.shape[1]
    library = _library(packed, out)
    if library is not None:
        library.call(f"dequantise_int{bits}_{suffix(out.dtype)}", rows, parts, n, packed, out)
        return out
    for part, codes, scales in _pieces(packed.view(rows * parts, -1), n, bits):
        numbers = _numbers(codes, scales, bits, part.stop - part.start, opmath_dtype(out.dtype))
        each = numbers.view(rows, parts, -1)
        total = each[:, 0]
        for other in each.unbind(1)[1:]:
            total += other
        out[:, part] = total
    return out


def _library(packed: Tensor, out: Tensor) -> Library | None:
    return kernels(out) if packed.is_contiguous() and out.is_contiguous() else None


def _pieces(packed: Tensor, n: int, bits: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(columns, their codes, their scales) in pieces of whole blocks whose temporaries fit into a cache."""
    first_scale, step = code_bytes(n, bits), rows_of(packed, packed.shape[0] * BLOCK) * BLOCK
    for start in range(0, n, step):
        stop = min(start + step, n)
        codes = packed[:, start * bits // 8 : start * bits // 8 + code_bytes(stop - start, bits)]
        blocks = slice(first_scale + 4 * (start // BLOCK), first_scale + 4 * -(-stop // BLOCK))
        yield slice(start, stop), codes, packed[:, blocks].view(torch.float32)


def _quantise_piece(x: Tensor, bits: int, error: Tensor | None, codes: Tensor, scales: Tensor) -> None:
    """Write codes uint8 and scales fp32 [rows, blocks] of x [rows, n], and what is lost to `error`."""
    dtype, (rows, n) = opmath_dtype(x.dtype), x.shape
    values = x.to(dtype) if error is None else x.to(dtype) + error
    blocks = F.pad(values, (0, scales.shape[1] * BLOCK - n)).view(rows, -1, BLOCK)
    largest = blocks.abs().amax(-1)
    finite = (largest <= _LARGEST).unsqueeze(-1)
    # Where all codes were 127 and the quotient had been rounded up, fp32's largest number would come back as infinity.
    top = torch.nextafter(torch.tensor(_LARGEST / LARGEST_CODE[bits]), torch.tensor(0.0)).item()
    # A tensor divides, because torch on a GPU multiplies by the inverse of a number, which is another scale.
    scale = (largest / torch.full_like(largest, LARGEST_CODE[bits])).clamp(_SMALLEST, top).float()
    inverse = scale.to(dtype).reciprocal().unsqueeze(-1)
    rounded = torch.where(finite, (blocks * inverse).round(), 0.0)
    scales.copy_(torch.where(finite.squeeze(-1), scale, float("nan")))
    if error is not None:
        lost = torch.where(finite, blocks - rounded * scale.to(dtype).unsqueeze(-1), 0.0)
        kept = finite.expand_as(blocks).reshape(rows, -1)[:, :n]
        error.copy_(torch.where(kept, lost.view(rows, -1)[:, :n].float(), error))
    if bits == 8:
        whole = rounded.to(torch.int8).view(torch.uint8).view(rows, -1)
    else:
        low, high = (rounded + 8).to(torch.uint8).view(rows, -1, 2, 16).unbind(2)
        whole = (low | high << 4).view(rows, -1)
    codes.copy_(whole[:, : codes.shape[1]])


def _numbers(codes: Tensor, scales: Tensor, bits: int, n: int, dtype: torch.dtype) -> Tensor:
    """codes uint8 times scales [rows, blocks], as [rows, n] of `dtype`."""
    rows = codes.shape[0]
    if bits == 8:
        whole = codes.view(torch.int8).to(dtype)
    else:
        halves = codes.reshape(rows, -1, 16)
        whole = torch.stack([halves & 15, halves >> 4], dim=2).view(rows, -1).to(dtype) - 8
    return whole[:, :n] * scales.to(dtype).repeat_interleave(BLOCK, dim=1)[:, :n]
