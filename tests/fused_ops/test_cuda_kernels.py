"""What is so of the CUDA kernels only: every way of sharing a row among threads, pointers that lie anywhere, scratch
memory, streams.
"""

import math

import pytest
import torch
from torch import Tensor

from fused_ops import fp8
from fused_ops.adam import adam_step, sgd_step
from fused_ops.cross_entropy import row_statistics, write_gradient
from fused_ops.native import library
from fused_ops.native.binding import Library
from fused_ops.native.cuda import CudaLibrary
from fused_ops.norm import sum_of_squares
from fused_ops.softmax import scaled_causal_alibi_softmax
from tests.fused_ops.levels import (
    DTYPES,
    adam_settings,
    assert_close,
    cuda_level,
    drawn,
    integers,
    scalar,
    sgd_settings,
)
from tests.fused_ops.test_norm_kernels import compare

pytestmark = pytest.mark.sampled

__all__ = ["cuda_level"]

LENGTHS = [8, 255, 512, 520, 1023, 2048, 4096, 4099, 8192, 8200]
"""Rows of one warp, of four and of sixteen, in packs and one by one, kept in registers and read again."""

MARGIN = 64


class Guarded:
    """Memory of `n` elements that begins `offset` elements behind an aligned place, between margins that nobody may
    write to.
    """

    def __init__(self, n: int, dtype: torch.dtype, offset: int) -> None:
        self.whole = torch.full((n + 2 * MARGIN,), 7.0, dtype=dtype)
        self.own = (
            self.whole[MARGIN + offset - 8 : MARGIN + offset - 8 + n] if offset else self.whole[MARGIN : MARGIN + n]
        )
        self.first = self.own.storage_offset()

    def put(self, values: Tensor) -> Tensor:
        return self.own.copy_(values.reshape(-1)).view(values.shape)

    def check(self) -> None:
        stop = self.first + self.own.numel()
        assert (self.whole[: self.first] == 7.0).all() and (self.whole[stop:] == 7.0).all(), "written beside the tensor"


def exact_softmax(scores: Tensor, scale: float, slopes: Tensor, documents: Tensor) -> Tensor:
    queries, keys = scores.shape[2:]
    key, query = torch.arange(keys), torch.arange(keys - queries, keys)
    values = scores.double() * scale + slopes.double().view(-1, 1, 1) * key
    hidden = (key > query[:, None]) | (documents[:, None, keys - queries :, None] != documents[:, None, None, :])
    return torch.softmax(values.masked_fill(hidden, -math.inf), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("keys", LENGTHS)
def test_softmax_of_any_length(cuda_level, keys, offset, dtype):
    b, n, queries = 2, 3, min(3, keys)
    memory, gradients = (Guarded(b * n * queries * keys, dtype, offset) for _ in range(2))
    values, incoming = (drawn(b, n, queries, keys, seed=seed, dtype=dtype) for seed in (1, 2))
    slopes, documents = drawn(n, seed=3, dtype=torch.float32).abs() / 8, integers(0, 2, (b, keys)).cumsum(-1) // 40
    exact = exact_softmax(values, 0.3, slopes, documents)
    scores = memory.put(values).requires_grad_()
    found = scaled_causal_alibi_softmax(scores, 0.3, slopes, documents=documents)
    assert_close(found.detach(), exact)
    rounded = found.detach().double()
    (gradient,) = torch.autograd.grad(found, scores, gradients.put(incoming))
    p, g = rounded, incoming.double()
    assert_close(gradient, (p * (g - (p * g).sum(-1, keepdim=True))) * 0.3, size=1.0)
    memory.check()
    gradients.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("queries, keys", [(40, 40), (520, 520), (9, 2056), (9, 8200)])
def test_softmax_of_every_number_of_seen_keys(cuda_level, queries, keys, sloped, documented, dtype):
    """Seen keys are whole packs and fewer than a pack behind them; what lies beyond them is never looked at."""
    values = drawn(1, 2, queries, keys, seed=1, dtype=dtype)
    slopes = torch.tensor([0.5, 0.01]) if sloped else None
    documents = integers(0, 3, (1, keys)) if documented else None  # not in order
    alike = torch.zeros(1, keys, dtype=torch.int64)
    exact = exact_softmax(
        values, -0.3, torch.zeros(2) if slopes is None else slopes, alike if documents is None else documents
    )
    hidden = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    found = scaled_causal_alibi_softmax(values.masked_fill_(hidden, math.nan), -0.3, slopes, documents=documents)
    assert_close(found, exact)
    assert not found.masked_select(hidden).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [40, 8200])
def test_softmax_backward_leaves_what_no_query_sees(cuda_level, keys, dtype):
    """The probabilities there are zeros, and so are their gradients: a write would be a third of the traffic.

    Numbers that differ stand in their place. A store is 16 bytes wide, so the rest of its last pack is written.
    """
    queries, pack = 24, 16 // dtype.itemsize
    probs, incoming = (drawn(1, 1, queries, keys, seed=seed, dtype=dtype) for seed in (1, 2))
    before = probs.clone()
    found = library.kernels(probs)
    assert found is not None
    found.call(f"softmax_backward_{library.suffix(dtype)}", 1, 1, queries, keys, probs, incoming, 0.3)
    for query in range(queries):
        seen = keys - queries + query + 1
        left = -(-seen // pack) * pack
        p, g = before[0, 0, query, :seen].double(), incoming[0, 0, query, :seen].double()
        assert_close(probs[0, 0, query, :seen], p * (g - (p * g).sum()) * 0.3, size=(p * g).abs().sum().item())
        assert torch.equal(probs[0, 0, query, left:], before[0, 0, query, left:])
        assert not probs[0, 0, query, seen:left].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("h", LENGTHS)
def test_norms_of_any_length(cuda_level, h, centred, dtype):
    for added in (False, True):
        compare(centred, added, (5, h), dtype)


@pytest.mark.parametrize("rows", [1, 130, 2100])
def test_norm_gradients_over_more_rows_than_groups(cuda_level, rows):
    """2,048 groups share rows of one warp."""
    compare(True, True, (rows, 32), torch.bfloat16)


@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 1, 1), (4, 4, 4), (3, 3, 5), (0, 2, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_optimizer_steps_wherever_the_arrays_lie(cuda_level, dtype, offsets):
    """Arrays that are aligned together somewhere are read in packs from there on; others element by element."""
    for n in (1, 3, 50, 5001):
        state = [Guarded(n, torch.float32, offsets[0]) for _ in range(3)]
        out, grad = Guarded(n, dtype, offsets[1]), Guarded(n, dtype, offsets[2])
        w, m, v = (memory.put(drawn(n, seed=seed, dtype=torch.float32).abs()) for seed, memory in enumerate(state))
        g = grad.put(drawn(n, seed=5, dtype=dtype))
        exact = [tensor.double() for tensor in (w, m, v, g)]
        adam_step(out.own, w, g, m, v, **adam_settings())
        adam_step(None, exact[0], exact[3], exact[1], exact[2], **adam_settings())
        sgd_step(out.own, w, g, m, **sgd_settings())
        sgd_step(None, exact[0], exact[3], exact[1], **sgd_settings())
        for ours, theirs in zip((w, m, v), exact, strict=False):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-7)
        assert torch.equal(out.own, w.to(dtype))
        for memory in (*state, out, grad):
            memory.check()


@pytest.mark.parametrize("step", [1.0, 2.0, 1000.0, 1e6])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.95), (0.9999, 0.999999)])
def test_bias_corrections_keep_their_digits(cuda_level, beta1, beta2, step):
    fp32 = [drawn(9, seed=seed, dtype=torch.float32).abs() for seed in range(4)]
    fp64 = [tensor.double() for tensor in fp32]
    for w, g, m, v in (fp32, fp64):
        changes = {"beta1": beta1, "beta2": beta2, "weight_decay": 0.0, "multiplier": scalar(1.0)}
        adam_step(None, w, g, m, v, **adam_settings(step, **changes))
    torch.testing.assert_close(fp32[0].double(), fp64[0], rtol=2e-6, atol=1e-7)


def test_a_skipped_step_leaves_every_bit(cuda_level):
    state = [drawn(1000, seed=seed, dtype=torch.float32) for seed in range(3)]
    out, before = state[0].bfloat16(), [tensor.clone() for tensor in state]
    grad = torch.full((1000,), math.nan)
    skipped = {"lr": 1.0, "multiplier": scalar(math.inf), "skip": torch.tensor(True)}
    adam_step(out, state[0], grad, *state[1:], **adam_settings(1.0, **skipped))
    sgd_step(out, state[0], grad, state[1], **sgd_settings(**skipped))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(state, before, strict=True)) and torch.equal(
        out, before[0].bfloat16()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 6])
@pytest.mark.parametrize(("columns", "real"), [(1, 1), (7, 6), (4500, 4497), (9000, 9000)])
def test_cross_entropy_of_rows_that_begin_anywhere(cuda_level, columns, real, offset, dtype):
    rows = 3
    memory = Guarded(rows * columns, dtype, offset)
    values, target = drawn(rows, columns, dtype=dtype) * 5, integers(-1, real, (rows,))
    logits = memory.put(values)
    largest, sums = row_statistics(logits, target, real, summed=True)
    wide = values.double()[:, :real]
    torch.testing.assert_close(largest.double(), wide.amax(1), rtol=0, atol=0)
    torch.testing.assert_close(sums[0].double(), (wide - wide.amax(1, keepdim=True)).exp().sum(1), rtol=2e-6, atol=0)
    torch.testing.assert_close(sums[2].double(), wide.sum(1), rtol=2e-6, atol=2e-5 * math.sqrt(real))
    weight, hit, smooth = (drawn(rows, seed=seed, dtype=torch.float32).abs() for seed in range(3))
    normaliser = torch.logsumexp(wide, 1).float()
    write_gradient(logits, target, real, normaliser, weight, hit, smooth)
    exact = torch.zeros(rows, columns, dtype=torch.float64)
    exact[:, :real] = (wide - normaliser.double()[:, None]).exp() * weight[:, None] - smooth[:, None]
    for row in range(rows):
        if target[row] >= 0:
            exact[row, target[row]] += hit[row]
    assert_close(logits, exact, slack=3)
    memory.check()


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_sum_of_squares_of_many_chunks(cuda_level, offset):
    memory = Guarded(200_003, torch.bfloat16, offset)
    x = memory.put(drawn(200_003, dtype=torch.bfloat16))
    assert sum_of_squares(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2])
@pytest.mark.parametrize(
    ("rows", "columns", "stride"),
    [(1, 1, 1), (16, 16, 16), (48, 272, 288), (130, 140, 140), (37, 8, 16), (144, 129, 131)],
)
def test_fp8_copies_are_the_reference_to_the_bit(cuda_level, monkeypatch, rows, columns, stride, format, dtype):
    """By rows and by columns, with a given scale and with its own; what is beyond the format saturates."""
    most = torch.finfo(dtype).max
    x = (drawn(rows, stride) * torch.exp(4 * drawn(rows, stride, seed=2))).clamp(-most, most).to(dtype)[:, :columns]
    x[0, 0] = most
    for scale in (None, torch.tensor(2.0**-3), torch.tensor(2.0**9)):
        for transposed in (True, False):
            ours, theirs = (fp8.empty(x, format, transposed) for _ in range(2))
            found = fp8.fill("input", x, ours, scale=scale)
            with monkeypatch.context() as patch:
                patch.setenv("MEGAZERO_FUSED", "reference")
                expected = fp8.fill("input", x, theirs, scale=scale)
            assert (
                torch.equal(found, expected)
                and torch.equal(fp8.measure(x), expected)
                and torch.equal(ours.inverse, theirs.inverse)
            )
            assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
            if ours.transposed is not None and theirs.transposed is not None:
                assert torch.equal(ours.transposed.view(torch.uint8), theirs.transposed.view(torch.uint8))


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2])
def test_fp8_rounding_of_every_16_bit_number(cuda_level, monkeypatch, format):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    ours, theirs = (fp8.empty(x, format, True) for _ in range(2))
    for scale in (1.0, 2.0**-20, 2.0**30):
        amax = fp8.fill("gradient", x, ours, scale=torch.tensor(scale))
        assert amax.isnan() and ours.inverse.isnan()  # there are NaNs among them
        with monkeypatch.context() as patch:
            patch.setenv("MEGAZERO_FUSED", "reference")
            fp8.fill("gradient", x, theirs, scale=torch.tensor(scale))
        real = ~x.isnan()
        assert torch.equal(ours.values.view(torch.uint8)[real], theirs.values.view(torch.uint8)[real])
        assert ours.values.float()[~real].isnan().all()


def test_scratch_memory_grows_and_the_smaller_stays(cuda_level):
    found = library.kernels(drawn(1, dtype=torch.float32))
    assert isinstance(found, CudaLibrary) and isinstance(found, Library)
    fresh = CudaLibrary(found.path, found.level)
    for columns in (10, 270_000, 50):
        x, sums = drawn(3, columns, dtype=torch.float32), torch.empty(columns)
        fresh.call("column_sums_f32", 3, columns, columns, x, sums)
        torch.testing.assert_close(sums.double(), x.double().sum(0), rtol=1e-5, atol=1e-5)
    (kept,) = fresh._scratch.values()
    assert len(kept) == 2 and kept[1].numel() >= 2 * kept[0].numel()


def test_a_launch_that_fails_is_an_error_with_a_name(cuda_level):
    """A grid that no card has. Drivers give it one of two numbers: an invalid configuration, or an invalid argument."""
    found = library.kernels(drawn(1, dtype=torch.float32))
    assert isinstance(found, CudaLibrary)
    x = drawn(1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"row_statistics_f32.*CUDA error [19]\)"):
        found.call("row_statistics_f32", 1 << 31, 1, 1, x, integers(0, 1, (1,)), x, x, 0)
