"""Every body of attention on a card against the scored path in float64 on the CPU: contexts and gradients, odd shapes,
and the rule.

FlexAttention is compiled for each case, which takes some seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fused_ops.attention import causal_attention
from fused_ops.attention.flex import flex_attention
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import efficient_attention, flash_attention
from fused_ops.attention.selection import AttentionChoice, Body, choose
from fused_ops.attention.trial import AttentionWorkload, find_support
from fused_ops.softmax import alibi_slopes
from megazero.system.device import cuda_available
from tests.e2e.command import metrics, relative, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

CARD = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of the error: its norm relative to the result's, and its largest value relative to the result's largest.
ONE_PASS = {BF16: (6e-3, 2e-2), FP16: (8e-4, 3e-3), FP32: (5e-6, 2e-5)}
SCORED = {BF16: (1e-2, 4e-2), FP16: (1.5e-3, 6e-3), FP32: (5e-6, 2e-5)}
"""The scored path rounds scores and probabilities to the tensors' dtype; the others keep scores in fp32."""

Shape = tuple[int, int, int, int, int]
"""s, b, key-value heads, query heads of each, head dim."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """A process compiles a body for a few shapes only; here there are more."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(
    body: Callable[..., Tensor], shape: Shape, dtype: torch.dtype, sloped: bool = False, run: int = 0, **more: Any
) -> None:
    """Context with and without a recorded gradient, and gradient of the projection, which is drawn in `dtype`."""
    s, b, groups, repeats, d = shape
    draw = torch.Generator().manual_seed(s + d)
    mixed = torch.randn(s, b, groups * (repeats + 2) * d, generator=draw).to(dtype)
    weight = torch.randn(s, b, groups * repeats * d, generator=draw).to(dtype)
    given: dict[str, Any] = {
        "slopes": torch.tensor(alibi_slopes(groups * repeats)) if sloped else None,
        "documents": None,
    } | more
    if run:
        given["documents"] = (torch.rand(b, s, generator=draw) < 1 / run).long().cumsum(1)

    def results(
        function: Callable[..., Tensor], to: Callable[[Tensor], Tensor], options: dict[str, Any]
    ) -> list[Tensor]:
        leaf = to(mixed).requires_grad_()
        attend = partial(function, leaf, groups, repeats, d, scale=1 / math.sqrt(d), **options)
        context = attend()
        kept = context.detach().clone()
        (gradient,) = torch.autograd.grad(context, leaf, to(weight))
        with torch.no_grad():
            return [kept, gradient, attend()]

    exact = results(reference_attention, Tensor.double, given)
    there = {name: each.to(CARD) if isinstance(each, Tensor) else each for name, each in given.items()}
    takes = {} if body in (flash_attention, efficient_attention) else there
    bounds = (SCORED if body is reference_attention else ONE_PASS)[dtype]
    for ours, theirs in zip(results(body, lambda tensor: tensor.to(CARD), takes), exact, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        error = ours.double().cpu() - theirs
        assert error.norm() <= bounds[0] * theirs.norm()
        assert error.abs().max() <= bounds[1] * theirs.abs().max()


PLAIN: list[Shape] = [
    (1, 1, 1, 1, 64),
    (7, 2, 3, 2, 40),
    (129, 2, 5, 1, 64),
    (300, 1, 2, 4, 128),
    (512, 2, 3, 1, 80),
    (200, 1, 1, 3, 256),
]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", PLAIN)
def test_flash(shape: Shape, dtype: torch.dtype) -> None:
    check(flash_attention, shape, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", PLAIN)
def test_efficient(shape: Shape, dtype: torch.dtype) -> None:
    check(efficient_attention, shape, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("sloped", "run"), [(False, 0), (True, 0), (True, 60), (False, 3)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (129, 2, 3, 2, 33), (300, 2, 5, 1, 64)])
def test_softmax(shape: Shape, sloped: bool, run: int, dtype: torch.dtype) -> None:
    check(reference_attention, shape, dtype, sloped, run)


@pytest.mark.parametrize(
    ("shape", "dtype", "sloped", "run"),
    [
        ((512, 2, 5, 1, 64), BF16, True, 0),
        ((512, 2, 3, 1, 128), BF16, True, 100),
        ((301, 2, 3, 2, 80), BF16, True, 60),
        ((129, 1, 2, 3, 16), BF16, False, 30),
        ((300, 1, 2, 1, 256), BF16, True, 0),
        ((384, 2, 6, 1, 64), FP16, True, 50),
        ((40, 2, 2, 2, 64), FP16, True, 9),
    ],
)
def test_flex(shape: Shape, dtype: torch.dtype, sloped: bool, run: int) -> None:
    check(flex_attention, shape, dtype, sloped, run)


@pytest.mark.parametrize("body", [flex_attention, reference_attention])
@pytest.mark.parametrize(
    ("reach", "cap", "sloped", "run"),
    [
        (Reach(1), None, False, 0),
        (Reach(100), None, True, 0),
        (Reach(129), 5.0, False, 60),
        (Reach(chunk=90), 5.0, True, 60),
        (EVERYTHING, 2.0, True, 0),
    ],
    ids=str,
)
def test_windows_chunks_and_caps(
    reach: Reach, cap: float | None, sloped: bool, run: int, body: Callable[..., Tensor]
) -> None:
    """Five blocks, so that some are beyond every window."""
    check(body, (600, 2, 2, 2, 64), BF16, sloped, run, reach=reach, cap=cap)


def test_flex_recomputed_and_compiled_once_for_other_documents() -> None:
    def recomputed(mixed: Tensor, *heads: int, **given: Any) -> Tensor:
        found = checkpoint(flex_attention, mixed, *heads, use_reentrant=False, preserve_rng_state=False, **given)
        assert isinstance(found, Tensor)
        return found

    torch._dynamo.utils.counters.clear()
    for body, length in ((flex_attention, 30), (recomputed, 50), (recomputed, 200)):
        check(body, (256, 2, 4, 1, 64), BF16, True, length)
    # With a gradient, without, and the lists of blocks.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_flex_keeps_no_scores() -> None:
    """Sixteen heads at 8192 positions: 2 GiB were one tensor of scores in 16 bits."""
    s, heads, d = 8192, 16, 64
    mixed = torch.randn(s, 1, heads * 3 * d, device=CARD, dtype=BF16, requires_grad=True)
    slopes = torch.tensor(alibi_slopes(heads), device=CARD)
    documents = torch.arange(s, device=CARD).div(1000, rounding_mode="floor")[None]
    torch.cuda.reset_peak_memory_stats(CARD)
    before = torch.cuda.memory_allocated(CARD)
    flex_attention(mixed, heads, 1, d, scale=0.125, slopes=slopes, documents=documents).sum().backward()
    assert torch.cuda.max_memory_allocated(CARD) - before < 512 * 2**20


def chosen(workload: AttentionWorkload, asked: str = "auto") -> AttentionChoice:
    return choose(workload.case(CARD), find_support(asked, workload, CARD))


def test_the_rule_on_this_card() -> None:
    """What it names works here: it was tried. Older cards have other answers, which the table's own test holds."""
    if torch.cuda.get_device_capability(CARD) < (8, 0):
        pytest.skip("a card before Ampere")
    workload = partial(AttentionWorkload, BF16, 256, 2, 4, 1, 64)
    assert chosen(workload()).body is Body.FLASH
    assert chosen(workload(alibi=True)).body is Body.FLEX, chosen(workload(alibi=True)).reason
    assert chosen(workload(documents=True)).body is Body.FLEX
    for bounds in ({"reach": Reach(100)}, {"reach": Reach(chunk=100)}, {"cap": 5.0}):
        assert chosen(workload(**bounds)).body is Body.FLEX, chosen(workload(**bounds)).reason
    assert chosen(workload(alibi=True, dropout=True)).body is Body.SOFTMAX
    assert chosen(AttentionWorkload(FP32, 256, 2, 4, 1, 64)).body is Body.EFFICIENT
    assert chosen(workload(), "flex").body is Body.FLEX
    with pytest.raises(ValueError, match="--attention flash cannot run: it has no place for ALiBi"):
        find_support("flash", workload(alibi=True), CARD)


def test_the_trial_compiles_what_training_uses_and_other_lengths_are_not_compiled() -> None:
    workload = AttentionWorkload(BF16, 256, 2, 4, 1, 64, alibi=True)
    find_support.cache_clear()
    torch._dynamo.utils.counters.clear()
    support = find_support("auto", workload, CARD)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    mixed = torch.randn(256, 2, 4 * 3 * 64, device=CARD, dtype=BF16, requires_grad=True)
    attend = partial(
        causal_attention,
        scale=0.125,
        slopes=torch.tensor(alibi_slopes(4), device=CARD),
        documents=None,
        support=support,
    )
    for _ in range(3):
        attend(mixed * 1.0, 4, 1, 64).sum().backward()
    with torch.no_grad():
        short, whole = attend(mixed.detach()[:100], 4, 1, 64), attend(mixed.detach(), 4, 1, 64)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with a gradient and without
    assert (whole[:100] - short).abs().max() <= 0.05 * whole.abs().max()


MODEL = ["--num-layers", 2, "--hidden-size", 128, "--num-attention-heads", 4, "--seq-length", 192, "--vocab-size", 1003]
STEPS = ["--train-iters", 10, "--micro-batch-size", 2, "--global-batch-size", 8, "--lr", 1e-3, "--eval-iters", 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "more"),
    [
        ("flex", ["--document-mask", "--eod-id", 7]),
        ("softmax", ["--document-mask", "--eod-id", 7]),
        ("flash", ["--position-embedding", "rotary", "--num-query-groups", 2]),
    ],
)
def test_training_through_each_equals_the_cpu(asked: str, more: list[object], tmp_path: Path, corpus: Path) -> None:
    flags = [
        *MODEL,
        *STEPS,
        *more,
        "--data-path",
        corpus,
        "--data-cache-path",
        tmp_path / "cache",
        "--precision",
        "bf16",
    ]
    paths = {kind: tmp_path / kind for kind in ("cpu", "gpu")}
    run(1, [*flags, "--device", "cpu", "--metrics-file", paths["cpu"]])
    told = run(1, [*flags, "--device", "cuda", "--attention", asked, "--metrics-file", paths["gpu"]])
    assert f"as --attention {asked} asks" in told
    cpu, gpu = ([line["loss"] for line in metrics(path)] for path in paths.values())
    assert relative(gpu, cpu) < 2e-2
