"""Matrices whose elements are codes: places in a table, times a scale for each block of neighbours. For frozen weights.

4 bits (NF4 with double quantisation: QLoRA, Dettmers et al. 2023, arXiv:2305.14314). 64 neighbours share a scale, their
largest absolute value. A code is the place of the nearest of the table's 16 numbers, which are quantiles of a normal
distribution. The scales less their mean are codes of 8 bits again, of which 256 share a scale in fp32.

8 bits. 256 neighbours share a scale in fp32. The table has 256 numbers: seven decades, of which each has twice as many
as the one below (Dettmers 2015, arXiv:1511.04561).

Blocks run through the whole matrix, row after row, and the last may be shorter. A rank that holds a box of it
(tensor parallelism) has that box's codes and the scales of all blocks that the box touches: so a box has the numbers
that it has in the whole matrix, wherever it is cut (`CodedBox`).

The numbers are those of bitsandbytes 0.50 on a CPU. It sums up the mean of the scales in fp32; with more than 32,768
scales its bits depend on the number of threads, and ours do not. And it rounds what becomes a code of 8 bits to a grid
of 2^16 numbers first, which can take the second nearest code where two are nearly as near.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import block_elements
from fused_ops.native.library import kernels, suffix

BLOCK: Mapping[int, int] = MappingProxyType({4: 64, 8: 256})
"""Bits of a code -> elements that share a scale."""
GROUP = 256
"""Scales of 4-bit blocks that share a scale of their own."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The numbers of 4-bit codes (appendix E of the paper)."""
_ALIGNMENT = 16
"""Codes, scales and the scales of scales begin at a multiple of so many bytes: a card reads that many at once."""
_GRID = 65535
"""Steps from -1 to 1 of the grid to which a number is rounded before it becomes a code of 8 bits."""
_SUMMED = 32768
"""Scales that are summed up at once: torch sums as many in one thread."""


def bytes_each(bits: int) -> float:
    """Bytes of an element of a large matrix."""
    return bits / 8 + (4 if bits == 8 else 1 + 4 / GROUP) / BLOCK[bits]


@cache
def table(bits: int, device: torch.device) -> Tensor:
    """The numbers of the codes, ascending: fp32 [2^bits]."""
    if bits == 4:
        return torch.tensor(NF4, dtype=torch.float32, device=device)
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        numbers += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class CodedMatrix:
    """A whole matrix of n elements.

    codes   uint8 [n]
    scales  of the blocks. 4 bits: codes uint8 [blocks]; 8 bits: fp32 [blocks]
    nested  of 4 bits: fp32 [1 + groups], the mean of the scales and then the scales of the scales; else empty
    """

    bits: int
    codes: Tensor
    scales: Tensor
    nested: Tensor


@torch.no_grad()
def encode(x: Tensor, bits: int) -> CodedMatrix:
    """A matrix of a floating dtype in codes of 4 or 8 bits. It is rounded to fp32 first.

    A block that holds an infinity or NaN gets a scale that is not finite: so what is made of it is not finite either
    (4 bits: all of the matrix, by the mean of the scales).
    """
    codes, scales = _encode(x.reshape(-1), bits)
    if bits == 8:
        return CodedMatrix(bits, codes, scales, scales.new_empty(0))
    offset = _mean(scales)
    of_scales, groups = _encode(scales - offset, 8, GROUP)
    return CodedMatrix(bits, codes, of_scales, torch.cat([offset.view(1), groups]))


def _encode(x: Tensor, bits: int, block: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes uint8 [n], scales fp32 [blocks]) of x [n]; in pieces whose temporaries fit into a cache."""
    block = block or BLOCK[bits]
    n, blocks = x.numel(), -(-x.numel() // block)
    codes = torch.empty(blocks * block, dtype=torch.uint8, device=x.device)
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    numbers = table(bits, x.device)
    middles, step = (numbers[:-1] + numbers[1:]) / 2, max(1, block_elements(x.device) // block)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        piece = x[first * block : last * block].float()
        whole = F.pad(piece, (0, (last - first) * block - piece.numel())).view(-1, block)
        largest = whole.abs().amax(1)
        scales[first:last] = largest
        shares = (whole * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1)
        if bits == 8:
            shares = 2 * ((shares + 1) * (_GRID / 2) + 0.5).floor().clamp(0, _GRID) / _GRID - 1
        found = torch.bucketize(shares, middles, out_int32=True).clamp(max=len(numbers) - 1)  # NaN is behind all
        codes[first * block : last * block] = found.view(-1)
    return codes[:n], scales


def _mean(scales: Tensor) -> Tensor:
    """The mean in fp32, which does not depend on the number of threads."""
    total = sum(part.sum().double() for part in scales.split(_SUMMED))
    return (torch.as_tensor(total) / scales.numel()).float()


@dataclass(frozen=True)
class CodedBox:
    """Where a box of a matrix lies in a row of bytes: its codes, the scales of the blocks it touches, and their scales.

    The box is `runs` ranges of `length` neighbours in the matrix. The first begins at element `first`, and each other
    one `stride` elements behind the one before. A run begins a byte of codes. 4 bits: the first of two neighbours is in
    the upper half. Each run has `blocks` scales, of which the last may be unused.
    """

    bits: int
    runs: int
    length: int
    first: int
    stride: int

    @classmethod
    def of(cls, shape: tuple[int, ...], box: tuple[tuple[int, int], ...], bits: int) -> CodedBox:
        """The box (row, row), (column, column) of a matrix of this shape."""
        (_, columns), ((top, bottom), (left, right)) = shape, box
        if (left, right) == (0, columns):
            return cls(bits, 1, (bottom - top) * columns, top * columns, 0)
        return cls(bits, bottom - top, right - left, top * columns + left, columns)

    @property
    def blocks(self) -> int:
        """The most blocks that a run touches."""
        block = BLOCK[self.bits]
        apart = math.gcd(self.stride, block) if self.runs > 1 else block
        latest = block - apart + self.first % apart  # element of its block at which a run can begin
        return -(-(latest + self.length) // block)

    @property
    def groups(self) -> tuple[int, int]:
        """The first group of scales and the one behind the last. There are none where scales are no codes."""
        if self.bits == 8:
            return 0, 0
        per, last = BLOCK[self.bits] * GROUP, self.first + (self.runs - 1) * self.stride + self.length - 1
        return self.first // per, last // per + 1

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a run."""
        return -(-self.length * self.bits // 8)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Bytes of codes, of scales and of the scales of scales, each up to a multiple of 16."""
        first, last = self.groups
        scales, nested = (4, 0) if self.bits == 8 else (1, 4 * (1 + last - first))
        sizes = self.runs * self.code_bytes, self.runs * self.blocks * scales, nested
        return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(self.parts)

    def views(self, packed: Tensor) -> CodedMatrix:
        """The parts of `packed` uint8 [nbytes]: codes uint8 [runs, code_bytes], scales [runs, blocks], nested."""
        codes, scales, nested = packed.split(self.parts)
        first, last = self.groups
        of_blocks = scales.view(torch.float32) if self.bits == 8 else scales
        return CodedMatrix(
            self.bits,
            codes[: self.runs * self.code_bytes].view(self.runs, -1),
            of_blocks[: self.runs * self.blocks].view(self.runs, -1),
            nested.view(torch.float32)[: (1 + last - first) * (self.bits == 4)],
        )

    def starts(self, device: torch.device) -> Tensor:
        """The first element of each run, int64 [runs]."""
        return self.first + self.stride * torch.arange(self.runs, device=device)


@torch.no_grad()
def pack(matrix: CodedMatrix, box: CodedBox, packed: Tensor) -> None:
    """Write a box of a matrix into `packed` uint8 [box.nbytes], on the matrix' device or another."""
    device, own = matrix.codes.device, torch.zeros(box.nbytes, dtype=torch.uint8, device=matrix.codes.device)
    starts, to, last = box.starts(device), box.views(own), len(matrix.scales) - 1
    for at in range(box.runs):
        run = matrix.codes[starts[at] : starts[at] + box.length]
        if box.bits == 4:
            run = F.pad(run, (0, run.numel() % 2))
            run = run[::2] << 4 | run[1::2]
        to.codes[at] = run
    numbers = (starts // BLOCK[box.bits]).unsqueeze(1) + torch.arange(box.blocks, device=device)
    to.scales.copy_(matrix.scales[numbers.clamp(max=last)])
    if box.bits == 4:
        first, stop = box.groups
        to.nested[0], to.nested[1:] = matrix.nested[0], matrix.nested[1 + first : 1 + stop]
    packed.copy_(own)


@torch.no_grad()
def decode(packed: Tensor, box: CodedBox, out: Tensor) -> Tensor:
    """The numbers of a box: `out` [box.runs, box.length], of a floating dtype. Its rows may lie apart.

    packed  uint8 [box.nbytes], beginning at a multiple of 16 bytes

    Number times scale is computed in fp32 and rounded to the dtype of `out`: the same bits on every machine.
    """
    assert out.shape == (box.runs, box.length) and out.stride(1) == 1, (out.shape, box)
    own, numbers = box.views(packed), table(box.bits, packed.device)
    library = kernels(out)
    if library is not None:
        nested = (table(8, packed.device), own.nested) if box.bits == 4 else (None, None)
        sizes = box.runs, box.length, box.first, box.stride, box.blocks, box.groups[0], out.stride(0)
        name = f"decode_{box.bits}_bits_{suffix(out.dtype)}"
        library.call(name, *sizes, numbers, nested[0], own.codes, own.scales, nested[1], out)
        return out
    scales = _scales(own, box)
    phases = (box.starts(packed.device) % BLOCK[box.bits]).unsqueeze(1)
    for runs, part in _pieces(box, packed.device):
        places = torch.arange(part.start, part.stop, device=packed.device)
        scale = scales[runs].gather(1, (phases[runs] + places) // BLOCK[box.bits])
        out[runs, part] = (numbers[_codes(own.codes[runs], part, box.bits)] * scale).to(out.dtype)
    return out


def _scales(own: CodedMatrix, box: CodedBox) -> Tensor:
    """The scale of each block: fp32 [runs, blocks]."""
    if box.bits == 8:
        return own.scales
    device, (first, last) = own.scales.device, box.groups
    numbers = (box.starts(device) // BLOCK[4]).unsqueeze(1) + torch.arange(box.blocks, device=device)
    group = (numbers // GROUP).clamp(max=last - 1) - first
    return table(8, device)[own.scales.long()] * own.nested[1 + group] + own.nested[0]


def _codes(codes: Tensor, part: slice, bits: int) -> Tensor:
    """The codes of these elements of runs, int64 [runs, elements]. codes: uint8 [runs, bytes]. part begins evenly."""
    if bits == 8:
        return codes[:, part].long()
    halves = codes[:, part.start // 2 : -(-part.stop // 2)]
    both = torch.stack([halves >> 4, halves & 15], dim=2).view(halves.shape[0], -1)
    return both[:, : part.stop - part.start].long()


def _pieces(box: CodedBox, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(runs, elements of them) in pieces whose temporaries fit into a cache."""
    length = block_elements(device)
    step = max(1, length // box.length)
    for first in range(0, box.runs, step):
        for start in range(0, box.length, length):
            yield slice(first, min(first + step, box.runs)), slice(start, min(start + length, box.length))
