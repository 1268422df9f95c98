"""Kernels of rotary positions, the embedding's gradient, the optimizers and the sum of squares, on every level."""

import math

import pytest
import torch
from torch import Tensor

from fused_ops.adam import adam_step, sgd_step
from fused_ops.embedding import embedding, embedding_gradient
from fused_ops.native.library import EMULATED
from fused_ops.norm import sum_of_squares
from fused_ops.registry import OPS, describe
from fused_ops.rotary import apply_rotary, rotary_tables, rotate_mixed
from megazero.config.rotary import RotarySettings
from tests.fused_ops.levels import CPU_LEVELS, DTYPES, adam_settings, assert_close, drawn, integers, level, sgd_settings

pytestmark = pytest.mark.sampled

__all__ = ["level"]


def run(function, x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    y.backward(grad.to(y.dtype))
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("s", "b", "groups", "repeats", "d"), [(1, 1, 1, 1, 2), (5, 2, 3, 1, 6), (4, 3, 2, 4, 34), (70, 1, 2, 2, 64)]
)
def test_rotary_equals_float64(level, s, b, groups, repeats, d, dtype):
    x, grad = (drawn(s, b, groups * (repeats + 2) * d, seed=i, dtype=dtype) for i in (1, 2))

    def turned(x: Tensor) -> Tensor:
        cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(s) + 3, d, RotarySettings(), x.dtype))
        return rotate_mixed(x, groups, repeats, cos, sin)

    def apart(x: Tensor) -> Tensor:
        cos, sin = (table[:, None, None] for table in rotary_tables(torch.arange(s) + 3, d, RotarySettings(), x.dtype))
        query, key, value = x.view(s, b, groups, repeats + 2, d).split([repeats, 1, 1], dim=3)
        query = apply_rotary(query.reshape(s, b, groups * repeats, d), cos, sin).view(s, b, groups, repeats, d)
        return torch.cat([query, apply_rotary(key.squeeze(3), cos, sin).unsqueeze(3), value], dim=3).view(x.shape)

    exact = run(turned, x.double(), grad)
    for ours, also, theirs in zip(run(turned, x, grad), run(apart, x, grad), exact, strict=True):
        assert_close(ours, theirs)
        assert torch.equal(ours, also)


def test_rotary_spreads_nan_no_further_than_its_pair(level):
    x = torch.ones(2, 1, 3 * 8)
    x[1, 0, 1], x[1, 0, 20] = math.nan, math.inf
    cos, sin = rotary_tables(torch.arange(2), 8, RotarySettings(), torch.float32)
    found = rotate_mixed(x, 1, 1, cos, sin)
    assert found.isnan().nonzero().tolist() == [[1, 0, 1], [1, 0, 5]] and found[1, 0, 20] == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "rows", "h"), [(1, 1, 1), (50, 7, 17), (1000, 3, 64), (33, 900, 16), (0, 5, 4)])
def test_embedding_gradient_equals_float64(level, tokens, rows, h, dtype):
    ids = integers(0, rows, (tokens,))
    grad, into = drawn(tokens, h, seed=2, dtype=dtype), drawn(rows, h, dtype=torch.float32)
    exact = into.double().index_add(0, ids, grad.double())
    embedding_gradient(ids, grad, into)
    assert_close(into, exact)
    into.fill_(math.nan)
    embedding_gradient(ids, grad, into, accumulate=False)
    assert_close(into, torch.zeros(rows, h, dtype=torch.float64).index_add(0, ids, grad.double()))
    leaf = drawn(rows, h, dtype=dtype).requires_grad_()
    embedding(ids, leaf).backward(grad)
    assert leaf.grad is not None
    assert_close(leaf.grad, torch.zeros(rows, h, dtype=torch.float64).index_add(0, ids, grad.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_of_32_bits_are_those_of_64(level, dtype):
    """The lookup takes both, and kernels read 64 bits."""
    ids, grad = integers(0, 9, (4, 25)), drawn(4, 25, 8, seed=2, dtype=dtype)
    results = []
    for given in (ids, ids.int()):
        into, leaf = torch.zeros(9, 8), drawn(9, 8, dtype=dtype).requires_grad_()
        embedding_gradient(given, grad, into)
        embedding(given, leaf).backward(grad)
        assert leaf.grad is not None and into.abs().sum() > 0
        results.append((into, leaf.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("level", [*CPU_LEVELS, EMULATED], indirect=True)
def test_embedding_gradient_refuses_ids_outside_the_table(level):
    """A card's kernel passes over them: the lookup has failed by then."""
    for ids in (torch.tensor([0, 3]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            embedding_gradient(ids, torch.ones(len(ids), 2), torch.zeros(3, 2))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_equal_float64(level, decoupled, grad_dtype, out_dtype):
    """Twenty steps; beta2 near 1, where 1 - beta2 has few digits in fp32."""
    for n in (1, 15, 16, 70_001):
        fp32 = [drawn(n, seed=i, dtype=torch.float32) for i in range(2)] + [torch.zeros(n) for _ in range(3)]
        fp64 = [tensor.double() for tensor in fp32]
        out = None if out_dtype is None else torch.full((n,), math.nan, dtype=out_dtype)
        for number in range(1, 21 if n < 100 else 4):
            grad = drawn(n, seed=10 + number, dtype=grad_dtype)
            for w, sgd_w, m, v, u in (fp32, fp64):
                written = out if w.dtype == torch.float32 else None
                adam_step(written, w, grad, m, v, **adam_settings(number, beta2=0.9999, decoupled=decoupled))
                sgd_step(None, sgd_w, grad, u, **sgd_settings(lr=1e-2))
        for ours, theirs in zip(fp32, fp64, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-6)
        assert out is None or torch.equal(out, fp32[0].to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_parameter_is_the_rounded_master_wherever_it_lies(level, threads, dtype):
    """Every bit of it, of subnormal, infinite and negative zero weights too, and nothing beside it is written."""
    torch.set_num_threads(threads)
    for n, offset in ((1, 0), (15, 3), (16, 0), (37, 15), (70_001, 0), (70_001, 5)):
        master = drawn(n, dtype=torch.float32) * torch.tensor([1.0, 1e-39, 3e-41, 1e-7, 1e30]).repeat(n)[:n]
        master[::11], master[5::13], master[7::17] = -0.0, math.inf, math.nan
        place = torch.full((n + 40,), 7.0, dtype=dtype)
        state = master.clone(), torch.zeros(n), torch.zeros(n), torch.ones(n)
        adam_step(place[offset : offset + n], *state, **adam_settings(1.0, lr=0.0, weight_decay=0.0))
        expected = torch.full((n + 40,), 7.0, dtype=dtype)
        expected[offset : offset + n] = master.to(dtype)
        real = ~expected.isnan()
        assert torch.equal(place.isnan(), expected.isnan())
        assert torch.equal(place.view(torch.int16)[real], expected.view(torch.int16)[real])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 15, 32768, 70_001])
def test_sum_of_squares_equals_float64(level, n, dtype):
    x = drawn(n, dtype=dtype) * 100
    assert sum_of_squares(x).item() == pytest.approx(math.fsum((x.double() ** 2).tolist()), rel=1e-13)
    assert torch.equal(sum_of_squares(x), sum_of_squares(x))
    if n:
        x[n // 2] = math.nan
        assert sum_of_squares(x).isnan()
        x[n // 2] = math.inf
        assert sum_of_squares(x).isposinf()


def test_the_registry_names_the_level(level, monkeypatch):
    bodies = describe(torch.get_default_device())
    assert all(
        bodies[op].startswith(level) and bodies[op].endswith("kernel")
        for op in (OPS if level not in CPU_LEVELS else bodies)
    )
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    assert set(describe("cpu").values()) == {"torch reference"}
