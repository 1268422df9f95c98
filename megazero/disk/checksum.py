"""The checksum of a piece: a sum of 64-bit hashes of its blocks, so that blocks may be read and written in any order.

A block of 64 KiB is stripes of 512 little-endian 64-bit words, the last one filled with zeros. Lane j starts as
(j+1) * STEP. A stripe's word w makes the lane mixed(lane ^ w), with mixed(x) = y ^ (y >> 29), y = x * FACTOR mod 2^64.
Then the lanes are folded in halves, mixed(low ^ (high rotated left by 31)), and the hash is mixed(lane 0 ^ bytes).
A piece adds mixed(mixed(hash ^ n * STEP)) for its n-th block, counted from 1.

`mixed` is a bijection, so a change within one word always changes the sum. A change of several words leaves the sum as
it was with a probability of 2^-64.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import torch

from fused_ops.native.binding import Library

BLOCK = 1 << 16
"""Bytes of a block."""
LANES = 512
FACTOR = np.uint64(0x9E3779B97F4A7C15)
STEP = np.uint64(0xD6E8FEB86659FD93)
MASK = (1 << 64) - 1


class Copier(Protocol):
    """Copies `count` bytes between two addresses and returns the checksum that they add to their piece.

    to     0 for the checksum alone
    block  the number of the first block of these bytes in the piece, from 0; they begin at that block's first byte
    """

    def __call__(self, to: int, source: int, count: int, block: int) -> int: ...


def copier(kernels: Library | None) -> Copier:
    """By the compiled kernels, or by numpy, at about a tenth of the rate."""
    return _plain if kernels is None else _Compiled(kernels)


class _Compiled:
    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def __call__(self, to: int, source: int, count: int, block: int) -> int:
        total = torch.zeros(1, dtype=torch.int64)
        self._kernels.call("copy_with_checksum", to, source, count, block, total)
        return int(total) & MASK


def _plain(to: int, source: int, count: int, block: int) -> int:
    if to:
        ctypes.memmove(to, source, count)
    return checksum(np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(source)), block)


def checksum(data: Any, block: int = 0) -> int:
    """What bytes (uint8 [n]) add to the checksum of their piece, of which the first is in block number `block`."""
    total, whole = 0, len(data) // BLOCK * BLOCK
    # The last block may be shorter, and an array has rows of one length.
    for first, blocks in ((0, data[:whole].reshape(-1, BLOCK)), (whole // BLOCK, data[whole:].reshape(1, -1))):
        if blocks.size:
            numbers = np.arange(first + block + 1, first + block + 1 + len(blocks), dtype=np.uint64)
            total += int(_mixed(_mixed(_hashes(blocks) ^ numbers * STEP)).sum(dtype=np.uint64))
    return total & MASK


def _mixed(x: Any) -> Any:
    y = x * FACTOR
    return y ^ (y >> np.uint64(29))


def _hashes(blocks: Any) -> Any:
    """uint64 [n] of blocks uint8 [n, bytes] of one length."""
    count, size = blocks.shape
    padded = np.pad(blocks, ((0, 0), (0, -size % (8 * LANES)))) if size % (8 * LANES) else np.ascontiguousarray(blocks)
    words = padded.view("<u8").reshape(count, -1, LANES)
    lanes = np.broadcast_to(np.arange(1, LANES + 1, dtype=np.uint64) * STEP, (count, LANES))
    for stripe in range(words.shape[1]):
        lanes = _mixed(lanes ^ words[:, stripe])
    while lanes.shape[1] > 1:
        low, high = np.split(lanes, 2, axis=1)
        lanes = _mixed(low ^ (high << np.uint64(31) | high >> np.uint64(33)))
    return _mixed(lanes[:, 0] ^ np.uint64(size))
