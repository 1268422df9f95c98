"""The checksum of pieces, beside plain Python integers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fused_ops.native import library
from megazero.disk.checksum import copier
from tests.fused_ops.levels import CPU_LEVELS

FACTOR, STEP, ALL = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1
SIZES = 1, 7, 8, 4095, 4096, 4097, 65535, 65536, 65537, 2 * 65536 + 4099
NUMPY = "numpy"
"""In place of a level of the kernels: what runs without them."""


def mixed(x: int) -> int:
    y = x * FACTOR & ALL
    return y ^ y >> 29


def by_hand(data: bytes, first: int) -> int:
    total = 0
    for number, at in enumerate(range(0, len(data), 65536), first + 1):
        block = data[at : at + 65536]
        lanes = [(lane + 1) * STEP & ALL for lane in range(512)]
        for start in range(0, len(block), 4096):
            stripe = block[start : start + 4096].ljust(4096, b"\0")
            words = (stripe[8 * lane : 8 * lane + 8] for lane in range(512))
            lanes = [mixed(lane ^ int.from_bytes(word, "little")) for lane, word in zip(lanes, words, strict=True)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            turned = [(lane << 31 | lane >> 33) & ALL for lane in lanes[half:]]
            lanes = [mixed(low ^ high) for low, high in zip(lanes[:half], turned, strict=True)]
        total += mixed(mixed(mixed(lanes[0] ^ len(block)) ^ number * STEP & ALL))
    return total & ALL


def copied(data: bytes, block: int, level: str) -> tuple[bytes, int]:
    """What the copier of a level leaves at an odd address, from an odd address, and its checksum."""
    kernels = None if level == NUMPY else library.cpu_library(level)
    if kernels is None and level != NUMPY:
        pytest.skip("the kernels are not compiled")
    assert kernels is None or kernels.level == level
    source = torch.tensor([0, *data], dtype=torch.uint8)
    to = torch.full((len(data) + 2,), 0xEE, dtype=torch.uint8)
    copy = copier(kernels)
    total = copy(to.data_ptr() + 1, source.data_ptr() + 1, len(data), block)
    assert to[0] == to[-1] == 0xEE, "not a byte more"
    assert copy(0, source.data_ptr() + 1, len(data), block) == total, "the same without a copy"
    return bytes(np.asarray(to[1:-1])), total


@pytest.mark.parametrize("block", [0, 5, 1 << 40])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cpu_level", [NUMPY, *CPU_LEVELS])
def test_copies_and_sums_as_the_definition_says(cpu_level: str, size: int, block: int) -> None:
    data = random.Random(size).randbytes(size)
    assert copied(data, block, cpu_level) == (data, by_hand(data, block))


@pytest.mark.parametrize("cpu_level", [NUMPY, *CPU_LEVELS])
def test_every_flipped_bit_changes_it(cpu_level: str) -> None:
    data = random.Random(1).randbytes(131)
    seen = {copied(data, 0, cpu_level)[1]}
    for bit in range(8 * len(data)):
        flipped = int.from_bytes(data, "little") ^ 1 << bit
        seen.add(copied(flipped.to_bytes(len(data), "little"), 0, cpu_level)[1])
    assert len(seen) == 8 * len(data) + 1


def test_blocks_that_change_places_or_lose_zeros_change_it() -> None:
    a, b = random.Random(2).randbytes(65536), random.Random(3).randbytes(65536)
    sums = [copied(data, 0, NUMPY)[1] for data in (a + b, b + a, a, a + bytes(1), a + bytes(4096), a + a, bytes(65536))]
    assert len(set(sums)) == len(sums)
    parts = copied(a, 0, NUMPY)[1] + copied(b, 1, NUMPY)[1]
    assert parts & ALL == sums[0], "a piece's checksum is the sum of its blocks', in any order"
