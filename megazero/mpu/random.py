"""Counter-based random numbers: each is a pure function of its key, without generator state, the same on every layout.

`fused_ops.counter_hash` makes the bits. Initial weights are keyed by (seed, parameter name, global row, global column),
dropout masks by (seed, sample number, layer, site, global element).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.blocks import rows_of
from fused_ops.counter_hash import GOLDEN, halves, mix, signed
from fused_ops.dropout import bias_dropout_residual, dropout
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterSpec


def _key(*words: object) -> int:
    """64 bits of a BLAKE2b hash of the words."""
    text = "\0".join(str(word) for word in words)
    return signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _normals(keys: Tensor, first: int, stop: int) -> Tensor:
    """Keys [R] -> float64 [R, stop - first] from N(0, 1); columns 2j and 2j + 1 are a pair of Box and Muller (1958)."""
    bits, offset = halves(keys, first, stop)
    pairs = bits.view(keys.numel(), -1, 2)
    uniform = torch.empty(pairs.shape[:2], dtype=torch.float64, device=keys.device).copy_(pairs[..., 0])
    radius = uniform.mul_(2.0**-32).add_(0.5 + 2.0**-33).log_().mul_(-2.0).sqrt_()
    angle = torch.empty_like(radius).copy_(pairs[..., 1]).mul_(2.0 * math.pi * 2.0**-32)
    out = torch.empty(pairs.shape, dtype=torch.float64, device=keys.device)
    torch.mul(angle.cos(), radius, out=out[..., 0])
    torch.mul(angle.sin_(), radius, out=out[..., 1])
    return out.view(keys.numel(), -1)[:, offset : offset + stop - first]


@torch.no_grad()
def initialise(out: Tensor, spec: ParameterSpec, seed: int) -> None:
    """Fill `out` (a parameter or its master weight: spec.local_shape, contiguous, any floating dtype) with its initial
    values: all of `initialise_range`.
    """
    assert out.shape == torch.Size(spec.local_shape), f"{spec.name}: {tuple(out.shape)} != {spec.local_shape}"
    initialise_range(out.view(-1), spec, 0, seed)


@torch.no_grad()
def initialise_range(out: Tensor, spec: ParameterSpec, start: int, seed: int) -> None:
    """Fill `out` [numel] with the initial values of elements [start, start + numel) of a parameter, in row-major order.

    Values are from N(0, spec.std^2), keyed by (seed, name, global row, global column), drawn in float64 and rounded
    once to out's dtype. Where std is 0 they are spec.fill. Padding rows are zero. Nothing is communicated. Rows are
    drawn in blocks, which bounds the memory.
    """
    stop = min(start + out.numel(), spec.stored_numel)
    out[max(0, stop - start) :] = 0.0
    if spec.std == 0.0:
        out[: max(0, stop - start)] = spec.fill
        return
    assert len(spec.local_shape) == 2, f"{spec.name}: random starts are for matrices"
    (row0, _), (column0, column1) = spec.box
    columns = column1 - column0
    base, block = _key("weight", seed, spec.name), rows_of(out, columns)
    for row in range(start // columns, -(-stop // columns), block):
        last = min(row + block, -(-stop // columns))
        keys = mix(torch.arange(row0 + row, row0 + last, device=out.device).mul_(GOLDEN).add_(base))
        drawn = _normals(keys, column0, column1).mul_(spec.std).flatten()
        first, end = max(start, row * columns), min(stop, last * columns)
        out[first - start : end - start] = drawn[first - row * columns : end - row * columns]


@dataclass(frozen=True)
class DropoutKey:
    """The key of a dropout: the run's seed, the global number of the layer, and which of the layer's dropouts it is.

    site: a number, or the name of an adapter's layer.
    """

    seed: int
    layer: int
    site: int | str

    def sample_keys(self, samples: Tensor, device: torch.device) -> Tensor:
        """int64 keys on `device`, one for each of `samples` (int64, any shape)."""
        keys = samples.to(device=device, dtype=torch.int64, non_blocking=True) * GOLDEN
        return mix(keys.add_(_key("dropout", self.seed, self.layer, self.site)))


def _check(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout must lie in [0, 1), not {p}")


def hidden_dropout(x: Tensor, p: float, key: DropoutKey, samples: Tensor, sequence_offset: int = 0) -> Tensor:
    """Zero each element of x [s_local, b, h] with probability p and scale the others by 1/(1-p).

    samples: int64 [b], the run's number of each sample. sequence_offset: global position of x's first row, so that
    under sequence parallelism a rank gets its slice of the whole mask. Only one key per row is saved for backward.
    Raises ValueError unless 0 <= p < 1.
    """
    _check(p)
    return x if p == 0.0 else dropout(x, _hidden_keys(x, key, samples, sequence_offset), p)


def add_hidden_dropout(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    key: DropoutKey,
    samples: Tensor,
    sequence_offset: int = 0,
) -> Tensor:
    """residual + hidden_dropout(x + bias) in one pass: x and residual [s_local, b, h], bias [h] or None.

    Raises ValueError unless 0 <= p < 1.
    """
    _check(p)
    keys = None if p == 0.0 else _hidden_keys(x, key, samples, sequence_offset)
    return bias_dropout_residual(x, bias, residual, keys, p)


def _hidden_keys(x: Tensor, key: DropoutKey, samples: Tensor, sequence_offset: int) -> Tensor:
    """int64 [s_local, b]: a key for every row of x [s_local, b, h]."""
    positions = torch.arange(sequence_offset, sequence_offset + x.shape[0], device=x.device)
    return mix(positions.mul_(GOLDEN).unsqueeze(1) + key.sample_keys(samples, x.device))


def sliced_dropout(x: Tensor, p: float, key: DropoutKey, samples: Tensor, slices: int, first: int) -> Tensor:
    """Dropout of x [s, b, k], this rank's features of a row-parallel layer's input.

    The global feature dimension has equal slices with keys of their own. x holds `slices` of them, from number `first`
    on. So a rank gets its part of the whole mask whatever tp is. Raises ValueError unless 0 <= p < 1.
    """
    _check(p)
    if p == 0.0:
        return x
    numbers = torch.arange(first, first + slices, device=x.device)
    # Numbers begin at 1, so that no slice has the row numbers of a hidden dropout.
    rows = ((numbers + 1) << 32) + torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    keys = mix(rows.mul_(GOLDEN).unsqueeze(1) + key.sample_keys(samples, x.device).unsqueeze(1))
    return dropout(x.unflatten(-1, (slices, -1)), keys, p).flatten(-2)


def attention_dropout(
    probs: Tensor, p: float, key: DropoutKey, samples: Tensor, head_offset: int = 0, query_offset: int = 0
) -> Tensor:
    """Dropout of attention probabilities [b, n_local, sq, sk].

    head_offset: global number of this rank's first head. query_offset: global position of the first query. Raises
    ValueError unless 0 <= p < 1.
    """
    _check(p)
    if p == 0.0:
        return probs
    heads = torch.arange(head_offset, head_offset + probs.shape[1], device=probs.device)
    queries = torch.arange(query_offset, query_offset + probs.shape[2], device=probs.device)
    # Numbers begin at 1, so that no head has the row numbers of a hidden dropout.
    rows = ((heads + 1) << 32).unsqueeze(1) + queries
    keys = mix(rows.mul_(GOLDEN) + key.sample_keys(samples, probs.device).view(-1, 1, 1))
    return dropout(probs, keys, p)


def sequence_offset(local_length: int, group: Group, sequence_parallel: bool) -> int:
    """Global position of the first row of this rank's [s(/t), b, h]."""
    return group.index * local_length if sequence_parallel else 0
