"""Random bits as a pure function of a key and a counter: the reference body.

It is a counter-based hash in wrapping int64, the finaliser of SplitMix64 (Steele et al. 2014, doi
10.1145/2660193.2660195) with two keys per row. csrc/cpu/dropout.cpp and csrc/cuda/dropout.cu compute the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)
MULTIPLIER_1 = signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = signed(0x94D049BB133111EB)


def _fold(x: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """x ^= x >>> bits, in place. torch's shift is arithmetic, so the copies of the sign bit are masked out."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - bits)) - 1))


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64 of any shape."""
    scratch = torch.empty_like(x)
    _fold(x, 30, scratch).mul_(MULTIPLIER_1)
    _fold(x, 27, scratch).mul_(MULTIPLIER_2)
    return _fold(x, 31, scratch)


def words(keys: Tensor, first: int, count: int) -> Tensor:
    """int64 [R, count]: hash of (key of the row, counter first + j). keys int64 [R]."""
    second = mix(keys + GOLDEN).unsqueeze(1)
    counters = torch.arange(first, first + count, device=keys.device).mul_(GOLDEN)
    x = keys.unsqueeze(1) + counters
    scratch = torch.empty_like(x)
    # With the second key, rows whose first keys are close have unrelated streams too.
    _fold(x, 30, scratch).mul_(MULTIPLIER_1).bitwise_xor_(second)
    _fold(x, 27, scratch).mul_(MULTIPLIER_2)
    return _fold(x, 31, scratch)


def halves(keys: Tensor, first: int, stop: int) -> tuple[Tensor, int]:
    """(int32 [R, 2P] uniform over all int32, offset): columns [first, stop) begin at this offset of the last axis."""
    start = first // 2
    found = words(keys, start, (stop + 1) // 2 - start)
    return found.view(torch.int32), first - 2 * start
