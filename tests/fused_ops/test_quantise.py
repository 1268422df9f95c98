"""Blocks of int8 and int4 against float64: the format read by a few lines of numpy, half a step as the bound of the
error, sums, error feedback, infinities, NaN, and the largest and smallest numbers of a dtype.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fused_ops.quantise import BLOCK, dequantise, packed_bytes, quantise, sum_dequantised
from tests.fused_ops.levels import DTYPES, cuda_level, drawn, level, the_same_for_any_threads
from tests.fused_ops.test_cuda_kernels import Guarded

pytestmark = pytest.mark.sampled
__all__ = ["cuda_level", "level"]

LARGEST = {8: 127, 4: 7}
SHAPES = [(1, 1), (3, 7), (2, 255), (1, 256), (3, 257), (2, 1000), (1, 5000), (4, 512)]


def read(packed: Tensor, n: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale of each element) [rows, n] in float64, byte by byte as the format says."""
    rows = packed.cpu().numpy()
    codes, scales = np.zeros((len(rows), n)), np.zeros((len(rows), n))
    first = math.ceil(math.ceil(n * bits / 8) / 16) * 16
    for r, row in enumerate(rows):
        for i in range(n):
            if bits == 8:
                codes[r, i] = row[i] - 256.0 * (row[i] > 127)
            else:
                byte = int(row[i // 32 * 16 + i % 16])
                codes[r, i] = (byte >> 4 if i % 32 >= 16 else byte & 15) - 8
            at = first + 4 * (i // 256)
            scales[r, i] = np.frombuffer(row[at : at + 4].tobytes(), dtype=np.float32)[0]
    return codes, scales


def sizes(x: Tensor) -> Tensor:
    """For each element of x [rows, n] the largest absolute value of its block, in float64."""
    exact = x.double().abs()
    return torch.cat([b.amax(1, keepdim=True).expand_as(b) for b in exact.split(256, dim=1)], dim=1)


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place, for results that are rounded to `dtype`."""
    return x.double().abs() * torch.finfo(dtype).eps * 0.51 + torch.finfo(dtype).smallest_normal


def mixed(rows: int, n: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Blocks of very different size."""
    return (drawn(rows, n, seed=seed) * torch.logspace(-2, 2, n, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_element_loses_half_a_step_at_most(level, shape, bits, dtype):
    x = mixed(shape[0], shape[1], dtype)
    packed = quantise(x, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], packed_bytes(shape[1], bits))
    codes, scales = (torch.from_numpy(found).to(x.device) for found in read(packed, shape[1], bits))
    step = sizes(x) / LARGEST[bits]
    assert ((scales - step).abs() <= 1.3e-7 * step).all() and codes.abs().max() <= LARGEST[bits]
    assert ((codes * scales - x.double()).abs() <= 0.5 * step * (1 + 1e-5)).all()
    found = dequantise(packed, bits, torch.full_like(x, math.nan))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(found, (codes.to(wide) * scales.to(wide)).to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bytes_of_a_row(bits):
    for n in (0, 1, 15, 16, 17, 256, 257, 4096, 100_000):
        codes, scales = math.ceil(n * bits / 8), 4 * math.ceil(n / 256)
        assert packed_bytes(n, bits) == math.ceil(codes / 16) * 16 + math.ceil(scales / 16) * 16
    assert packed_bytes(1 << 20, bits) == (1 << 20) * bits // 8 + (1 << 20) // 64


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("parts", "n"), [(1, 5), (2, 300), (3, 1), (6, 2049)])
def test_sums_are_made_in_full_precision(level, parts, n, bits, dtype):
    """Of decoded rows, in float64; 16-bit sums are rounded once."""
    x = mixed(parts, n, dtype)
    packed = quantise(x, bits)
    codes, scales = (torch.from_numpy(found).to(x.device) for found in read(packed, n, bits))
    exact, size = (codes * scales).sum(0), (codes * scales).abs().sum(0)
    found = sum_dequantised(packed, bits, torch.full((n,), math.nan, dtype=dtype))
    wide = 1e-15 if dtype == torch.float64 else 1.2e-7
    assert ((found.double() - exact).abs() <= parts * wide * size + rounding(exact, dtype)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_lost_is_kept(level, bits, dtype):
    """x and the old error together are what travels and the new error."""
    for rows, n in SHAPES:
        x, error = mixed(rows, n, dtype), drawn(rows, n, seed=3, dtype=torch.float32)
        before = error.clone()
        packed = quantise(x, bits, error)
        codes, scales = (torch.from_numpy(found).to(x.device) for found in read(packed, n, bits))
        total = x.double() + before.double()
        assert ((codes * scales + error.double() - total).abs() <= 2e-7 * sizes(total)).all()
        assert (error.double().abs() <= 0.5 * sizes(total) / LARGEST[bits] * (1 + 1e-5)).all()
        assert n < 16 or error.abs().max() > 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_in_its_block_only(level, what, bits, dtype):
    for at in (0, 256, 300, 515):
        x, error = drawn(2, 516, dtype=dtype), drawn(2, 516, seed=2, dtype=torch.float32)
        clean, before = dequantise(quantise(x, bits, error.clone()), bits, torch.empty_like(x)), error.clone()
        x[1, at] = what
        packed = quantise(x, bits, error)
        found = dequantise(packed, bits, torch.empty_like(x))
        block = slice(at // BLOCK * BLOCK, at // BLOCK * BLOCK + BLOCK)
        assert found[1, block].isnan().all() and torch.equal(error[1, block], before[1, block])
        found[1, block] = clean[1, block]
        assert torch.equal(found, clean) and error.isfinite().all()
        assert sum_dequantised(packed, bits, torch.empty(516, dtype=dtype))[block].isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_numbers_come_back_finite_and_the_smallest_as_nothing(level, bits, dtype):
    wide = torch.float32 if dtype == torch.float64 else dtype
    top = torch.finfo(wide).max
    x = drawn(1, 700, dtype=dtype) / 100
    x[0, 0], x[0, 1], x[0, 256], x[0, 512:] = top, -top, -top, 0.0
    found = dequantise(quantise(x, bits), bits, torch.empty_like(x))
    assert found.isfinite().all() and (found[0, 512:] == 0).all()
    assert ((found.double() - x.double()).abs() <= sizes(x) * (0.5 / LARGEST[bits] + 1e-2)).all()
    assert (found[0, :2].double().abs() >= 0.99 * top).all()
    # The whole range below: the bound is half of the smallest scale, which is a normal number.
    small = drawn(1, 700, dtype=torch.float32).to(dtype) * 2.0 ** (-14 if dtype == torch.float16 else -133)
    assert small.abs().max() > 0
    off = (dequantise(quantise(small, bits), bits, torch.empty_like(small)).double() - small.double()).abs()
    half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    assert (off <= 0.5 * (sizes(small) / LARGEST[bits]).clamp(min=2.0**-126) * (1 + 1e-5) + half).all()


def test_a_number_beyond_fp32_counts_as_overflow():
    x = torch.tensor([[1.0, 1e39]], dtype=torch.float64)
    assert dequantise(quantise(x, 8), 8, torch.empty_like(x)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_threads_change_no_bit(level, bits, dtype):
    def results() -> list[Tensor]:
        x, error = mixed(3, 20_001, dtype), drawn(3, 20_001, seed=2, dtype=torch.float32)
        packed = quantise(x, bits, error)
        return [packed, error, sum_dequantised(packed, bits, torch.empty(20_001, dtype=dtype))]

    the_same_for_any_threads(results)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_body_packs_the_same_bytes(level, bits, dtype, monkeypatch):
    """Also of padding, of elements that lie halfway between two codes, of the largest numbers and of nothing."""
    for rows, n in SHAPES:
        x = mixed(rows, n, dtype)
        x[0, : n // 2] = (torch.arange(n // 2) % 29 - 14).to(dtype) / 2
        x[0, 0] = LARGEST[bits]
        largest = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
        for values in (x, torch.full_like(x, largest), torch.zeros_like(x)):
            found = quantise(values, bits)
            with monkeypatch.context() as patch:
                patch.setattr("fused_ops.quantise.kernels", lambda *tensors: None)
                assert torch.equal(found, quantise(values, bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_nothing_is_written_beside_the_tensors(cuda_level, offset, bits, dtype):
    for rows, n in ((1, 40), (2, 257), (3, 264)):
        values, lost = drawn(rows, n, dtype=dtype), drawn(rows, n, seed=2, dtype=torch.float32)
        x, error, out = Guarded(rows * n, dtype, offset), Guarded(rows * n, torch.float32, offset), None
        packed = quantise(x.put(values), bits, error.put(lost))
        assert torch.equal(packed, quantise(values, bits, lost)) and torch.equal(error.own, lost.view(-1))
        out = Guarded(rows * n, dtype, offset)
        found = dequantise(packed, bits, out.own.view(rows, n))
        assert torch.equal(found, dequantise(packed, bits, torch.empty_like(values)))
        for guarded in (x, error, out):
            guarded.check()
