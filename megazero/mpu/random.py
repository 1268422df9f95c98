"""Random numbers that are a pure function of what they are for: no generator state, the same on every layout.

A counter-based hash (the finaliser of SplitMix64: Steele et al. 2014, doi 10.1145/2660193.2660195, keyed twice per row)
in wrapping int64. Initial weights are keyed by (seed, parameter name, global row, global column); dropout masks by
(seed, sample number, layer, site, global element). Blocks of rows bound the memory.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import rows_of
from megazero.mpu.grid import Group
from megazero.mpu.place import Place


def _signed(value: int) -> int:
    """The int64 with the bits of value mod 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _fold(x: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """x ^= x >>> bits, in place. torch shifts arithmetically: the copies of the sign are masked out."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64."""
    scratch = torch.empty_like(x)
    _fold(x, 30, scratch).mul_(MULTIPLIER_1)
    _fold(x, 27, scratch).mul_(MULTIPLIER_2)
    return _fold(x, 31, scratch)


def _key(*words: object) -> int:
    """64 bits of a strong hash of the words."""
    text = "\0".join(str(word) for word in words)
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _words(keys: Tensor, first: int, count: int) -> Tensor:
    """int64 [R, count]: hash of (key of the row, counter first + j). keys int64 [R]."""
    second = _mix(keys + GOLDEN).unsqueeze(1)
    counters = torch.arange(first, first + count, device=keys.device).mul_(GOLDEN)
    x = keys.unsqueeze(1) + counters
    scratch = torch.empty_like(x)
    # A second key inside: rows whose first keys happen to be near each other still have unrelated streams.
    _fold(x, 30, scratch).mul_(MULTIPLIER_1).bitwise_xor_(second)
    _fold(x, 27, scratch).mul_(MULTIPLIER_2)
    return _fold(x, 31, scratch)


def _halves(keys: Tensor, first: int, stop: int) -> tuple[Tensor, int]:
    """int32 [R, 2P] uniform over all int32, of which columns [first, stop) start at the returned offset."""
    start = first // 2
    words = _words(keys, start, (stop + 1) // 2 - start)
    return words.view(torch.int32), first - 2 * start


def _normals(keys: Tensor, first: int, stop: int) -> Tensor:
    """float64 [R, stop - first], N(0, 1): Box and Muller's pair for columns 2j and 2j + 1."""
    halves, offset = _halves(keys, first, stop)
    pairs = halves.view(keys.numel(), -1, 2)
    uniform = torch.empty(pairs.shape[:2], dtype=torch.float64, device=keys.device).copy_(pairs[..., 0])
    radius = uniform.mul_(2.0**-32).add_(0.5 + 2.0**-33).log_().mul_(-2.0).sqrt_()
    angle = torch.empty_like(radius).copy_(pairs[..., 1]).mul_(2.0 * math.pi * 2.0**-32)
    out = torch.empty(pairs.shape, dtype=torch.float64, device=keys.device)
    torch.mul(angle.cos(), radius, out=out[..., 0])
    torch.mul(angle.sin_(), radius, out=out[..., 1])
    return out.view(keys.numel(), -1)[:, offset : offset + stop - first]


@torch.no_grad()
def initialise(out: Tensor, place: Place, seed: int) -> None:
    """Fill `out` (a parameter, or a master of it; place.local_shape, any floating dtype) with its initial values.

    N(0, place.std) keyed by (seed, name, global row, global column), drawn in float64 and rounded once to out's dtype;
    the constant place.fill where std is 0; zero in padding rows.
    """
    assert out.shape == torch.Size(place.local_shape), f"{place.name}: {tuple(out.shape)} != {place.local_shape}"
    if place.std == 0.0:
        rows = place.box[0][1] - place.box[0][0]
        out[:rows] = place.fill
        out[rows:] = 0.0
        return
    assert out.dim() == 2, f"{place.name}: random starts are for matrices"
    (row0, row1), (column0, column1) = place.box
    out[row1 - row0 :] = 0.0
    base = _key("weight", seed, place.name)
    block = rows_of(out, column1 - column0)
    for start in range(row0, row1, block):
        stop = min(start + block, row1)
        keys = _mix(torch.arange(start, stop, device=out.device).mul_(GOLDEN).add_(base))
        out[start - row0 : stop - row0] = _normals(keys, column0, column1).mul_(place.std)


@dataclass(frozen=True)
class DropoutKey:
    """What a dropout is: the run's seed, the global number of the layer, and which of the layer's dropouts."""

    seed: int
    layer: int
    site: int

    def sample_keys(self, samples: Tensor, device: torch.device) -> Tensor:
        """int64 keys of the shape of `samples`."""
        keys = samples.to(device=device, dtype=torch.int64, non_blocking=True) * GOLDEN
        return _mix(keys.add_(_key("dropout", self.seed, self.layer, self.site)))


class _Dropout(torch.autograd.Function):
    """x [..., k] with one key per row: the mask is drawn again in backward, so nothing but the keys is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.p = p
        return _dropped(x, keys, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (keys,) = ctx.saved_tensors
        return _Dropout.apply(grads[0], keys, ctx.p), None, None


def _dropped(x: Tensor, keys: Tensor, p: float) -> Tensor:
    out = torch.mul(x, 1.0 / (1.0 - p)).contiguous()
    rows, keys = out.view(-1, x.shape[-1]), keys.reshape(-1)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    block = rows_of(x, x.shape[-1])
    for start in range(0, rows.shape[0], block):
        halves, _ = _halves(keys[start : start + block], 0, x.shape[-1])
        rows[start : start + block].masked_fill_(halves[:, : x.shape[-1]] < threshold, 0.0)
    return out


def _check(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout must lie in [0, 1), not {p}")


def hidden_dropout(x: Tensor, p: float, key: DropoutKey, samples: Tensor, sequence_offset: int = 0) -> Tensor:
    """Zero each element of x [s_local, b, h] with probability p, scale the rest by 1/(1-p).

    samples int64 [b]: the run's number of each sample. sequence_offset: global position of x's first row, so that a
    rank's part under sequence parallelism gets exactly its slice of the whole mask. Only a key per row is saved.
    """
    _check(p)
    if p == 0.0:
        return x
    positions = torch.arange(sequence_offset, sequence_offset + x.shape[0], device=x.device)
    keys = _mix(positions.mul_(GOLDEN).unsqueeze(1) + key.sample_keys(samples, x.device))
    result: Tensor = _Dropout.apply(x, keys, p)
    return result


def attention_dropout(probs: Tensor, p: float, key: DropoutKey, samples: Tensor, head_offset: int = 0, query_offset: int = 0) -> Tensor:
    """Dropout of attention probabilities [b, n_local, sq, sk]; head_offset: global number of this rank's first head."""
    _check(p)
    if p == 0.0:
        return probs
    heads = torch.arange(head_offset, head_offset + probs.shape[1], device=probs.device)
    queries = torch.arange(query_offset, query_offset + probs.shape[2], device=probs.device)
    # From 1 on, so that no head's rows are those of a hidden dropout.
    rows = ((heads + 1) << 32).unsqueeze(1) + queries
    keys = _mix(rows.mul_(GOLDEN) + key.sample_keys(samples, probs.device).view(-1, 1, 1))
    result: Tensor = _Dropout.apply(probs, keys, p)
    return result


def sequence_offset(local_length: int, group: Group, sequence_parallel: bool) -> int:
    """Global position of the first row of this rank's [s(/t), b, h]."""
    return group.index * local_length if sequence_parallel else 0
