"""Matrices of codes against a plain loop in numpy, every body against the plain one, boxes against the whole matrix,
and all of it against bitsandbytes where that is installed.
"""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_ops.coded import BLOCK, GROUP, NF4, CodedBox, CodedMatrix, decode, encode, pack, table
from tests.fused_ops.levels import DTYPES, cuda_level, drawn, level, the_same_for_any_threads

pytestmark = pytest.mark.sampled
__all__ = ["cuda_level", "level"]

SHAPES = [(1, 1), (3, 7), (5, 64), (6, 40), (9, 256), (40, 1001), (70, 512)]


def matrix(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Weights with rows of different sizes."""
    return drawn(rows, columns, seed=seed, dtype=torch.float32) * torch.logspace(-2, 0, rows).unsqueeze(1)


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, n) for n in shape)


def packed(coded: CodedMatrix, shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> tuple[Tensor, CodedBox]:
    lies = CodedBox.of(shape, box, coded.bits)
    into = torch.full((lies.nbytes,), 255, dtype=torch.uint8)
    pack(coded, lies, into)
    return into, lies


def decoded(coded: CodedMatrix, shape: tuple[int, ...], box=None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A box of a matrix, or all of it."""
    box = box or whole(shape)
    size = [stop - start for start, stop in box]
    into, lies = packed(coded, shape, box)
    return decode(into, lies, torch.full((lies.runs, lies.length), math.nan, dtype=dtype)).view(size)


def loop(coded: CodedMatrix) -> np.ndarray:
    """The numbers of a matrix, one by one in float64; the table of scales is built from its definition."""
    decades = [
        sign * 10.0 ** (decade - 6) * (0.1 + 0.9 * (k + 0.5) / 2**decade)
        for decade in range(7)
        for k in range(2**decade)
        for sign in (1, -1)
    ]
    eight = sorted([0.0, 1.0, *decades])
    numbers = list(NF4) if coded.bits == 4 else eight
    found = []
    for i, code in enumerate(coded.codes.tolist()):
        at = i // BLOCK[coded.bits]
        scale = coded.scales[at].item()
        if coded.bits == 4:
            scale = eight[int(scale)] * coded.nested[1 + at // 256].item() + coded.nested[0].item()
        found.append(numbers[code] * scale)
    return np.array(found)


def test_the_tables() -> None:
    for bits in (4, 8):
        numbers = table(bits, torch.device("cpu"))
        assert len(numbers) == 2**bits and numbers[-1] == 1 and 0 in numbers
        assert all(one < other for one, other in pairwise(numbers.tolist()))
    # Appendix E: quantiles of a normal distribution, seven below zero and eight above it, over the largest.
    normal, end = torch.distributions.Normal(0.0, 1.0), 1 - (1 / 30 + 1 / 32) / 2
    below, above = (normal.icdf(torch.linspace(0.5, end, n, dtype=torch.float64)) for n in (8, 9))
    quantiles = torch.cat([-below[1:].flip(0), above]) / above[-1]
    assert (quantiles - torch.tensor(NF4, dtype=torch.float64)).abs().max() < 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_code_is_that_of_the_nearest_number(shape: tuple[int, int], bits: int) -> None:
    """Of the whole matrix. Blocks run through it row after row, and the last one may be shorter."""
    x = matrix(*shape)
    coded = encode(x, bits)
    flat, numbers = x.view(-1).double(), table(bits, torch.device("cpu")).double()
    for at, part in enumerate(flat.split(BLOCK[bits])):
        largest = part.abs().max()
        off = (numbers[coded.codes[at * BLOCK[bits] :][: len(part)].long()] * largest - part).abs()
        nearest = (numbers * largest - part.unsqueeze(1)).abs().amin(1)
        assert (off <= nearest + (3.1e-5 if bits == 8 else 1e-6) * largest).all()
        if bits == 8:
            assert coded.scales[at] == largest.float()
    if bits == 4:
        largest = torch.stack([part.abs().max() for part in flat.split(64)])
        mean = largest.mean()
        assert abs(coded.nested[0].item() - mean) <= 1e-6 * mean and len(coded.nested) == 1 + -(-len(largest) // GROUP)
        eight = table(8, torch.device("cpu")).double()
        for at, part in enumerate((largest - mean).split(GROUP)):
            most = part.abs().max()
            assert abs(coded.nested[1 + at] - most) <= 1e-6 * mean
            nearest = (eight * most - part.unsqueeze(1)).abs().amin(1)
            off = (eight[coded.scales[at * GROUP :][: len(part)].long()] * most - part).abs()
            assert (off <= nearest + 3.1e-5 * most + 1e-6 * mean).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_a_plain_loop(level, shape, bits, dtype):
    coded = encode(matrix(*shape), bits)
    found, exact = decoded(coded, shape, dtype=dtype).view(-1), torch.from_numpy(loop(coded)).to(coded.codes.device)
    assert ((found.double() - exact).abs() <= exact.abs() * max(3e-7, torch.finfo(dtype).eps) + 1e-7).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_box_has_the_numbers_of_the_whole_matrix(level, bits, dtype):
    """Wherever it is cut: at blocks, within them, at odd elements. Every body gives the bits of the plain one."""
    for shape, boxes in {
        (70, 512): [((0, 35), (0, 512)), ((35, 70), (0, 512)), ((0, 70), (0, 256)), ((0, 70), (256, 512))],
        (41, 777): [((13, 41), (0, 777)), ((0, 41), (259, 518)), ((40, 41), (776, 777)), ((3, 5), (1, 777))],
        (24, 24): [((0, 24), (8, 16)), ((6, 12), (0, 24)), ((0, 24), (12, 24))],
        (300, 64): [((290, 300), (0, 64)), ((0, 300), (32, 64))],
    }.items():
        coded = encode(matrix(*shape), bits)
        plain = decoded(coded, shape, dtype=torch.float64).float()
        for box in boxes:
            (top, bottom), (left, right) = box
            found = decoded(coded, shape, box, dtype)
            assert torch.equal(found, plain[top:bottom, left:right].to(dtype)), (shape, box)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_bytes_of_a_box(bits: int) -> None:
    """Half a byte or one for each element and one or four for each block; of 4 bits also four for each 256 blocks."""
    for rows, columns in ((64, 512), (4096, 4096)):
        n = rows * columns
        lies = CodedBox.of((rows, columns), whole((rows, columns)), bits)
        exact = (
            n + 4 * n // 256 if bits == 8 else n // 2 + n // 64 + math.ceil((4 + 4 * math.ceil(n / 64 / 256)) / 16) * 16
        )
        assert lies.nbytes == exact
        halves = [
            CodedBox.of((rows, columns), ((0, rows), half), bits)
            for half in ((0, columns // 2), (columns // 2, columns))
        ]
        assert sum(half.nbytes for half in halves) <= exact + 4 * n // 64 // 256 + 32
    odd = CodedBox.of((5, 24), ((0, 5), (4, 20)), bits)
    assert odd.blocks == 2 and odd.code_bytes == 2 * bits, "a run can begin at the last element but three of a block"
    assert CodedBox.of((5, 128), ((0, 5), (64, 128)), 4).blocks == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_is_seen(level, bits):
    for value in (math.inf, math.nan):
        x = matrix(8, 512)
        x[3, 5] = value
        found = decoded(encode(x, bits), (8, 512))
        assert not found.view(-1, BLOCK[bits])[3 * 512 // BLOCK[bits]].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros(level, bits):
    x = matrix(4, 256)
    x[1:3] = 0
    assert (decoded(encode(x, bits), (4, 256))[1:3] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_change_no_bit(level, bits):
    def results() -> list[Tensor]:
        coded = encode(matrix(3000, 1024), bits)  # 48,000 scales of 4-bit blocks
        return [coded.codes, coded.scales, coded.nested, decoded(coded, (3000, 1024), dtype=torch.bfloat16)]

    the_same_for_any_threads(results, (1, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_has_the_same_bits(dtype: torch.dtype) -> None:
    """Codes, scales and numbers, of NF4 with double quantisation and of 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bits_and_bytes = pytest.importorskip("bitsandbytes.functional")
    for rows, columns in ((96, 512), (130, 250), (640, 1024)):
        whole_blocks = columns % 64 == 0  # it decodes others wrongly on a CPU with AVX-512
        x = matrix(rows, columns).to(dtype)
        theirs, state = bits_and_bytes.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
        ours, n = encode(x, 4), rows * columns
        assert torch.equal(ours.codes[::2] << 4 | ours.codes[1::2], theirs.view(-1)[: n // 2])
        assert torch.equal(ours.nested[1:], state.state2.absmax) and ours.nested[0] == state.offset
        assert torch.equal(ours.scales, state.absmax)
        if whole_blocks:
            numbers = bits_and_bytes.dequantize_4bit(theirs, state)
            assert torch.equal(decoded(ours, (rows, columns), dtype=dtype), numbers.view(rows, columns))
        eight, state = bits_and_bytes.quantize_blockwise(x, blocksize=256)
        coded = encode(x, 8)
        assert torch.equal(coded.codes, eight.view(-1)) and torch.equal(coded.scales, state.absmax)
        numbers = bits_and_bytes.dequantize_blockwise(eight, state)
        assert torch.equal(decoded(coded, (rows, columns), dtype=dtype), numbers.view(rows, columns))
