"""Initial weights and dropout masks: the same on every layout, and random.

Rows 24 and 25 of the numerical faults. Statistical bounds are several standard errors wide; the numbers are functions
of their keys alone, so a test that passes once passes always.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fused_ops.blocks import block_elements
from megazero.mpu import random
from megazero.mpu.grid import Group
from megazero.mpu.parameter import Parameter, ParameterKind, shard
from megazero.mpu.random import (
    DropoutKey,
    attention_dropout,
    hidden_dropout,
    initialise,
    initialise_range,
    sequence_offset,
)


def weights(
    rows: int, columns: int, name: str = "w", seed: int = 1, dtype: torch.dtype = torch.float64, std: float = 1.0
) -> Tensor:
    spec = shard(name, (rows, columns), ParameterKind.MATRIX, std=std)
    out = torch.full(spec.local_shape, math.nan, dtype=dtype)
    initialise(out, spec, seed)
    return out


def pieces(
    shape: tuple[int, ...], dim: int | None, size: int, padded: int | None, dtype: torch.dtype, **rest: float
) -> list[Tensor]:
    found = []
    for rank in range(size):
        spec = shard("name", shape, ParameterKind.MATRIX, dim=dim, rank=rank, size=size, padded=padded, **rest)
        parameter = Parameter(spec, dtype, "cpu")
        parameter.data.fill_(math.nan)
        initialise(parameter, spec, 5)
        found.append(parameter.detach())
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 60), (60, 12), (12, 12), (24, 3012)])
@pytest.mark.parametrize("dim", [0, 1])
def test_fault_24_weights_of_every_layout_are_the_same_bits(shape, dim, dtype):
    """Shards of 3, 5, 15, ... columns: they begin at odd columns and at every position in a vector register."""
    (whole,) = pieces(shape, None, 1, None, dtype, std=0.02)
    for size in (2, 3, 4, 6, 12):
        assert torch.equal(torch.cat(pieces(shape, dim, size, None, dtype, std=0.02), dim), whole)
    (master,) = pieces(shape, None, 1, None, torch.float64, std=0.02)
    assert torch.equal(master.to(dtype), whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_of_a_range_are_those_of_the_whole(dim):
    """Ranges begin and end within rows and within the vocabulary's padding, and span blocks of rows."""
    columns = block_elements(torch.device("cpu")) // 26 * 2  # 13 rows are a block
    spec = shard(
        "w", (40, columns), ParameterKind.MATRIX, dim=dim, rank=1, size=2, padded=50 if dim == 0 else None, std=0.02
    )
    whole = torch.full(spec.local_shape, math.nan)
    initialise(whole, spec, 5)
    numel = whole.numel()
    for start, stop in ((0, 7), (5, numel // 3), (numel // 3, numel - 11), (numel - 11, numel)):
        part = torch.full((stop - start,), math.nan)
        initialise_range(part, spec, start, 5)
        assert torch.equal(part, whole.view(-1)[start:stop])


@pytest.mark.parametrize(("vocab", "padded"), [(29, 36), (5, 24), (36, 36)])
def test_fault_24_vocabulary_padding_is_zero(vocab, padded):
    (whole,) = pieces((vocab, 10), 0, 1, vocab, torch.float64, std=1.0)
    for size in (1, 2, 3, 4):
        joined = torch.cat(pieces((vocab, 10), 0, size, padded, torch.float64, std=1.0))
        assert joined.shape[0] == padded
        assert torch.equal(joined[:vocab], whole) and not joined[vocab:].any()


def test_blocks_of_rows_do_not_show(monkeypatch):
    whole = weights(50, 33)
    monkeypatch.setattr(random, "rows_of", lambda x, columns: 7)
    assert torch.equal(weights(50, 33), whole)


def test_the_number_of_threads_does_not_show():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = weights(300, 1003)
    torch.set_num_threads(3)
    three = weights(300, 1003)
    torch.set_num_threads(threads)
    assert torch.equal(one, three)


def test_constants():
    assert all(torch.equal(piece, torch.ones(5)) for piece in pieces((10,), 0, 2, None, torch.float32, fill=1.0))
    (padded,) = pieces((3, 2), 0, 1, 5, torch.float32, fill=2.0)
    assert torch.equal(padded, torch.tensor([2.0, 2, 2, 0, 0])[:, None].expand(5, 2))


def test_the_values_are_fixed():
    """A change of these numbers changes every run: it must be meant."""
    expected = [
        *(0.5790020014430655, -0.629590818914175, -0.2648929545236473, -1.9985020343220077, -0.589767494916031),
        *(-0.3459676983362106, 0.18430686780268385, 0.4210827534067323, 0.05861934327324427),
    ]
    found = weights(3, 3, "blocks.0.mlp.up.weight", 1234)
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-14)


def test_weights_are_normal():
    x = weights(1000, 2001, std=0.5) / 0.5
    n = x.numel()
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    ordered = x.flatten().sort().values
    distance = (0.5 * (1 + torch.erf(ordered / math.sqrt(2))) - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance < 1.63 / math.sqrt(n)  # Kolmogorov and Smirnov, 1%
    assert 4.5 < x.abs().max() < 6.8


def correlation(a: Tensor, b: Tensor) -> float:
    return (((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())).item()


def test_weights_are_unrelated():
    """Neighbours in a row, in a column and in a pair; names, seeds and layers; and the same of squares."""
    x = weights(400, 500)
    others = [weights(400, 500, name) for name in ("v", "w.", "blocks.1.w", "blocks.2.w", "blocks.11.w")]
    others += [weights(400, 500, seed=seed) for seed in (0, 2, 3, -1, 2**40 + 1)]
    pairs = [(x, other) for other in others] + list(pairwise(others))
    for lag in (1, 2, 3, 4, 8, 16, 64):
        pairs += [(x[:, :-lag], x[:, lag:]), (x[:-lag], x[lag:])]
    pairs += [(x[:, 0::2], x[:, 1::2]), (x[:-1, 1:], x[1:, :-1]), (x[:-1, :-2], x[1:, 2:])]
    pairs.append((x[:, :400], x[:, :400].t()))
    for a, b in pairs:
        bound = 4.5 / math.sqrt(a.numel())
        assert abs(correlation(a, b)) < bound
        assert abs(correlation(a.square(), b.square())) < bound
    # Rows and columns as a whole: the largest singular value of a matrix of independent normals is sqrt(400) +
    # sqrt(500).
    assert torch.linalg.matrix_norm(x, 2).item() == pytest.approx(math.sqrt(400) + math.sqrt(500), rel=0.03)
    assert x.flatten().unique().numel() == x.numel()


def test_fault_24_names_that_look_alike_are_different_weights():
    assert not torch.equal(weights(4, 4, "a", 11), weights(4, 4, "a1", 1))


KEY = DropoutKey(seed=3, layer=2, site=1)
SAMPLES = torch.tensor([5, 900, 12])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales(p):
    x = torch.ones(64, 3, 500, dtype=torch.float64)
    y = hidden_dropout(x, p, KEY, SAMPLES)
    dropped = y == 0
    assert abs(dropped.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / x.numel())
    assert torch.equal(y[~dropped], torch.full_like(y[~dropped], 1 / (1 - p)))


def test_dropout_masks_are_unrelated():
    """Positions, columns, samples, layers, sites, seeds, heads and the two kinds of dropout."""

    def mask(key: DropoutKey = KEY, first: int = 5) -> Tensor:
        samples = torch.tensor([first, first + 1])
        return (hidden_dropout(torch.ones(100, 2, 400), 0.3, key, samples) == 0).double()

    x = mask()
    pairs = [(x, mask(DropoutKey(*key))) for key in ((3, 3, 1), (3, 2, 0), (4, 2, 1), (3, 1, 2))]
    pairs += [(x, mask(first=7)), (x[:, 0], x[:, 1])]
    pairs += [(x[:-lag], x[lag:]) for lag in (1, 2, 5, 64)]
    pairs += [(x[..., :-lag], x[..., lag:]) for lag in (1, 2, 3, 5, 64)]
    probs = (attention_dropout(torch.ones(2, 4, 100, 400), 0.3, KEY, torch.tensor([5, 6])) == 0).double()
    pairs += [(probs[:, i], probs[:, i + 1]) for i in range(3)]
    pairs += [(probs[0], probs[1]), (probs[:, 0], x.transpose(0, 1))]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 4.5 / math.sqrt(a.numel())
    assert torch.equal(mask(first=6)[:, 0], x[:, 1]), "a sample's mask does not depend on its place in the micro-batch"


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_fault_25_parts_of_the_sequence_and_of_the_heads_are_slices(size):
    x = torch.randn(12, 3, 7, dtype=torch.float64)
    whole = hidden_dropout(x, 0.3, KEY, SAMPLES)
    parts = []
    for index, part in enumerate(x.chunk(size)):
        offset = sequence_offset(len(part), Group(tuple(range(size)), index, None), True)
        parts.append(hidden_dropout(part, 0.3, KEY, SAMPLES, offset))
    assert torch.equal(torch.cat(parts), whole)
    assert sequence_offset(12, Group((0, 1), 1, None), False) == 0
    probs = torch.rand(3, 12, 9, 11, dtype=torch.float64)
    whole = attention_dropout(probs, 0.3, KEY, SAMPLES)
    n = 12 // size
    heads = [attention_dropout(probs[:, i * n : i * n + n], 0.3, KEY, SAMPLES, i * n) for i in range(size)]
    assert torch.equal(torch.cat(heads, 1), whole)
    assert torch.equal(attention_dropout(probs[:, :, 4:], 0.3, KEY, SAMPLES, 0, 4), whole[:, :, 4:])
    assert torch.equal(attention_dropout(probs[1:2], 0.3, KEY, SAMPLES[1:2]), whole[1:2])
    assert torch.equal(attention_dropout(probs[..., :6], 0.3, KEY, SAMPLES), whole[..., :6])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fault_25_backward_and_recompute_draw_the_same_mask(dtype, recompute):
    x = torch.randn(8, 3, 50, dtype=torch.float64).to(dtype).requires_grad_()
    function = lambda x: hidden_dropout(x.sin(), 0.4, KEY, SAMPLES)  # noqa: E731
    y = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False) if recompute else function(x)
    weight = torch.randn(8, 3, 50, dtype=torch.float64).to(dtype)
    y.backward(weight)
    mask = (y.detach() != 0).to(dtype) * (1 / 0.6)
    scaled = torch.where(y != 0, weight * (1 / 0.6), 0.0).to(dtype)
    assert mask.any() and x.grad is not None and x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, scaled * x.detach().cos(), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_dropout_saves_keys_only():
    saved: list[Tensor] = []
    x = torch.randn(16, 3, 100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        hidden_dropout(x, 0.1, KEY, SAMPLES)
    assert sum(tensor.numel() for tensor in saved) == 16 * 3


def test_dropout_of_nothing_and_of_too_much():
    x = torch.ones(2, 3, 4)
    assert hidden_dropout(x, 0.0, KEY, SAMPLES) is x
    for p in (1.0, -0.1):
        with pytest.raises(ValueError, match=str(p)):
            hidden_dropout(x, p, KEY, SAMPLES)
    strided = torch.randn(4, 3, 2).transpose(0, 2)
    assert torch.equal(
        hidden_dropout(strided, 0.5, KEY, SAMPLES), hidden_dropout(strided.contiguous(), 0.5, KEY, SAMPLES)
    )
