"""Calls of torch's operators that only a GPU has: shapes, strides, dtypes and alignment, without a GPU.

A training on the CPU makes the same FP8 products as on a card. Each call is looked at on the way: torch checks it again
with fake tensors of the device cuda, and what cuBLASLt asks beyond that is checked here. Attention's kernels run on
fake tensors, whose results have the strides that the kernels give.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torchs

from fused_ops import fp8
from fused_ops.attention.flex import BLOCK, flex_body, visible_blocks
from fused_ops.attention.sdpa import heads_of, joined
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs the errors that are asked for
E4M3, E5M2, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
SCALED_MM: Any = torch._scaled_mm
Call = dict[str, Any]


def _lies_off(x: Tensor, size: int) -> bool:
    """Whether x begins beside a multiple of `size` bytes, here and on a card, where each piece of memory begins at one
    of 512. (Here it begins at one of 64, and the program decides by the address.)
    """
    return bool(x.data_ptr() % size and x.storage_offset() * x.itemsize % size)


CUBLASLT: tuple[tuple[Callable[[Call], bool], str], ...] = (
    (lambda c: c["a"].dtype == c["b"].dtype == E5M2, "two matrices in e5m2"),
    (lambda c: any(_lies_off(x, 16) for x in (c["a"], c["b"])), "a matrix that is not aligned to 16 bytes"),
    (lambda c: any(_lies_off(x, 16) for x in (c["scale_a"], c["scale_b"])), "a scale not aligned to 16 bytes"),
    (lambda c: any(x.numel() != 1 for x in (c["scale_a"], c["scale_b"])), "a scale that is not one number"),
    (lambda c: c["bias"] is not None and c["out_dtype"] == FP32, "a bias beside a result in fp32"),
    (lambda c: c["bias"] is not None and c["bias"].dtype != c["out_dtype"], "a bias of another dtype than the result"),
    (lambda c: c["bias"] is not None and c["bias"].shape != (c["b"].shape[1],), "a bias of another length"),
    (lambda c: c["bias"] is not None and _lies_off(c["bias"], 256), "a bias not aligned to 256 bytes"),
    (lambda c: c["out"] is not None and not c["out"].is_contiguous(), "a result that is not contiguous"),
    (lambda c: c["out"] is not None and _lies_off(c["out"], 256), "a result not aligned to 256 bytes"),
    (lambda c: c["out"] is not None and c["out"].dtype != c["out_dtype"], "a result of another dtype"),
    (
        lambda c: c["out"] is not None and c["out"].shape != (c["a"].shape[0], c["b"].shape[1]),
        "a result of another shape",
    ),
)
"""What torch's fake run does not look at: checks of torch's CUDA code (ATen/native/cuda/ScaledBlas.cpp), and alignments
that cuBLASLt needs or that torch tells it (256 bytes). An H100 with CUDA 13 refused a scale that lay elsewhere.
"""


def complaint(call: Call) -> str | None:
    """What a card would refuse in a call of the scaled product; None for a good one."""
    with FakeTensorMode(), torch.no_grad():

        def fake(x: Any) -> Any:
            tensor = isinstance(x, Tensor)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if tensor else x

        try:
            result = SCALED_MM(*(fake(x) for name, x in call.items() if name in "ab"), **_named(call, fake))
        except RuntimeError as error:
            return str(error).splitlines()[0]
    if (result.shape, result.dtype) != ((call["a"].shape[0], call["b"].shape[1]), call["out_dtype"]):
        return f"a result of shape {tuple(result.shape)} and {result.dtype}"
    return next((words for applies, words in CUBLASLT if applies(call)), None)


def _named(call: Call, fake: Callable[[Any], Any]) -> Call:
    return {name: fake(x) for name, x in call.items() if name not in ("a", "b", "out")}  # torch has no fake one for out


@contextmanager
def watched_products() -> Iterator[list[tuple[str | None, tuple[int, ...]]]]:
    """A context that collects for each scaled product (what a card would refuse, (m, k, n))."""
    seen: list[tuple[str | None, tuple[int, ...]]] = []

    def watched(a: Tensor, b: Tensor, *, out: Tensor | None = None, bias: Tensor | None = None, **named: Any) -> Tensor:
        seen.append((complaint({"a": a, "b": b, "out": out, "bias": bias, **named}), (*a.shape, b.shape[1])))
        result: Tensor = SCALED_MM(a, b, bias=bias, **named) if out is None else SCALED_MM(a, b, out=out, **named)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", watched)
        yield seen


FLAGS = [*small_model(2, heads=4), "--hidden-size", "64", "--train-iters", "2", "--global-batch-size", "4"]
FLAGS += ["--precision", "bf16", "--eval-iters", "1"]
RUNS = {
    "48 tokens, swiglu": (1, "--fp8 current --seq-length 48 --activation swiglu --micro-batch-size 1"),
    "17 tokens": (1, "--fp8 delayed --seq-length 17 --micro-batch-size 1 --disable-bias-linear"),
    "grouped, two micro-batches": (1, "--fp8 delayed --seq-length 24 --micro-batch-size 2 --num-query-groups 2"),
    "tp, sequence parallel": (2, "--fp8 current --seq-length 32 --micro-batch-size 1 --tp 2 --sequence-parallel"),
    "tp": (2, "--fp8 delayed --seq-length 32 --micro-batch-size 1 --tp 2 --recompute-granularity full"),
    "ZeRO-2": (2, "--fp8 current --seq-length 16 --micro-batch-size 1 --zero-stage 2 --precision fp16"),
}


def products(rank: int, size: int, flags: list[str]) -> list[tuple[str | None, tuple[int, ...]]]:
    job, _ = job_on_rank(rank, size, flags)
    with watched_products() as seen:
        job.fit()
    return seen


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("name", RUNS)
def test_a_card_would_take_every_fp8_product_of_a_training(name: str, corpus: Path, tmp_path: Path) -> None:
    size, more = RUNS[name]
    for seen in run_ranks(size, products, size, [*FLAGS, *more.split(), *data_flags(corpus, tmp_path)]):
        assert {shape for words, shape in seen if words is None} and not [found for found in seen if found[0]]


def good_call() -> Call:
    """Of 16 x 48 with 48 x 32."""
    scales = {name: torch.empty((), dtype=FP32) for name in ("scale_a", "scale_b")}
    matrices = {"a": torch.empty(16, 48, dtype=E4M3), "b": torch.empty(32, 48, dtype=E4M3).t()}
    return {**matrices, **scales, "out_dtype": BF16, "bias": torch.empty(32, dtype=BF16), "out": None}


MISTAKES: dict[str, tuple[Callable[[Call], Call], str]] = {
    "rows first": (lambda c: {"b": c["b"].contiguous()}, "mat2 must be col_major"),
    "columns first": (lambda c: {"a": c["a"].t().contiguous().t()}, "self must be row_major"),
    "k of 40": (
        lambda c: {"a": torch.empty(16, 40, dtype=E4M3), "b": torch.empty(32, 40, dtype=E4M3).t()},
        "divisible",
    ),
    "n of 24": (lambda c: {"b": torch.empty(24, 48, dtype=E4M3).t(), "bias": None}, "divisible by 16"),
    "a 16-bit matrix": (lambda c: {"a": c["a"].to(BF16)}, "float8"),
    "a scale in fp64": (lambda c: {"scale_a": c["scale_a"].double()}, "fp32"),
    "both e5m2": (lambda c: {"a": c["a"].view(E5M2), "b": c["b"].view(E5M2)}, "two matrices in e5m2"),
    "a scale within a vector": (lambda c: {"scale_b": torch.empty(4, dtype=FP32)[1]}, "a scale not aligned"),
    "two scales": (lambda c: {"scale_a": torch.empty(16, 1, dtype=FP32)}, "scal"),
    "a bias in fp32": (lambda c: {"bias": torch.empty(32, dtype=FP32)}, "another dtype"),
    "a bias beside fp32": (
        lambda c: {"out_dtype": FP32, "bias": torch.empty(32, dtype=FP32)},
        "beside a result in fp32",
    ),
    "a short bias": (lambda c: {"bias": torch.empty(31, dtype=BF16)}, "another length"),
    "a bias within a buffer": (lambda c: {"bias": torch.empty(48, dtype=BF16)[16:]}, "bias not aligned"),
    "a result within a buffer": (
        lambda c: {"out": torch.empty(33, 16, dtype=BF16)[1:].view(16, 32)},
        "result not aligned",
    ),
    "a result with gaps": (lambda c: {"out": torch.empty(16, 64, dtype=BF16)[:, :32]}, "not contiguous"),
    "a result in fp32": (lambda c: {"out": torch.empty(16, 32, dtype=FP32)}, "result of another dtype"),
    "a large result": (lambda c: {"out": torch.empty(16, 33, dtype=BF16)}, "result of another shape"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_call_that_a_card_refuses_is_found(name: str) -> None:
    change, words = MISTAKES[name]
    assert complaint(good_call()) is None
    found = complaint(good_call() | change(good_call()))
    assert found is not None and words in found, found


def test_a_step_that_forgot_the_alignment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was before a card refused it: the scale is an entry of a vector."""
    call, scales = good_call(), torch.empty(4, dtype=FP32)
    monkeypatch.setattr(fp8, "_aligned", lambda x, size: x)
    with watched_products() as seen:
        fp8.product(call["a"], call["b"].t(), scales[0], scales[1], BF16, call["bias"])
    assert [words for words, _ in seen] == ["a scale not aligned to 16 bytes"]


# --- attention ----------------------------------------------------------------------------------------------------

ATEN = torch.ops.aten
SHAPES = [(1, 1, 1, 1, 8), (130, 2, 4, 1, 64), (257, 3, 2, 1, 128), (2048, 1, 16, 1, 256), (129, 2, 1, 3, 72)]
GROUPED = (130, 2, 2, 4, 64)


def flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    context, lse, *rest = ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=0.1)
    grad = torch.empty_like(context)
    inputs = grad, query, key, value, context, lse, *rest[:4], 0.0, True, *rest[4:6]
    return context, ATEN._scaled_dot_product_flash_attention_backward(*inputs, scale=0.1)


def cudnn(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    found = ATEN._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True, False, scale=0.1)
    context, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = found
    inputs = torch.empty_like(context), query, key, value, context, lse, seed, offset, None, cum_q, cum_k, max_q, max_k
    return context, ATEN._scaled_dot_product_cudnn_attention_backward(*inputs, 0.0, True, scale=0.1)


def efficient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    context, lse, seed, offset = ATEN._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, True, scale=0.1
    )
    inputs = torch.empty_like(context), query, key, value, None, context, lse, seed, offset, 0.0, [True] * 3 + [False]
    return context, ATEN._scaled_dot_product_efficient_attention_backward(*inputs, True, scale=0.1)[:3]


def split(mixed: Tensor, groups: int, repeats: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = heads_of(mixed, groups, repeats, d)
    if repeats == 1:
        return query, key, value
    return query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def by_heads(mixed: Tensor, groups: int, repeats: int, d: int) -> tuple[Tensor, ...]:
    """A planted fault: copies in another order of memory."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in split(mixed, groups, repeats, d))


def copies(kernel: Any, split: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """What is copied around a kernel on a card, or has another shape or dtype than it should."""
    s, b, groups, repeats, d = shape
    with FakeTensorMode(), torch.no_grad():
        mixed = torch.empty(s, b, groups * (repeats + 2) * d, dtype=dtype, device="cuda")
        inputs = split(mixed, groups, repeats, d)
        context, gradients = kernel(*inputs)
        found = ["the last axis of an input has gaps"] * any(x.stride(-1) != 1 and d > 1 for x in inputs)
        whole = joined(context)
        found += ["the context"] * (not whole._is_view() or not whole.is_contiguous())
        found += ["a result of another shape"] * (whole.shape != (s, b, groups * repeats * d))
        found += ["another dtype"] * any(x.dtype != dtype for x in (context, *gradients))
        found += [
            "a gradient of another shape" for x, grad in zip(inputs, gradients, strict=True) if x.shape != grad.shape
        ]
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [*SHAPES, GROUPED])
@pytest.mark.parametrize("kernel", [flash, cudnn, efficient])
def test_attention_reads_the_projection_and_writes_the_context_in_place(
    kernel: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """But the memory-efficient kernel, which writes the samples one after the other."""
    in_place = kernel is not efficient or shape[0] == 1 or shape[1] == 1
    assert copies(kernel, split, shape, dtype) == ([] if in_place else ["the context"])


@pytest.mark.parametrize("kernel", [flash, cudnn])
def test_queries_in_another_order_of_memory_are_found(kernel: Any) -> None:
    assert copies(kernel, by_heads, SHAPES[1], BF16) == ["the context"]


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK, 300, 2048])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_waits_for_nothing(length: int, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values: lists as torch's kernel reads them, a context that is a view, gradients as inputs."""
    monkeypatch.setattr(torchs, "_validate_device", lambda query, key, value: None)
    device, b = torch.device("meta"), 2
    ends = torch.empty(b, length, dtype=torch.int64, device=device) if documents else None
    blocks = visible_blocks(length, ends, device)
    count = -(-length // BLOCK)
    for number, found in enumerate(blocks):
        assert found.shape == (b if documents else 1, 1, *[count] * (1 + number % 2))
        assert found.is_contiguous() and found.dtype == torch.int32
    mixed = torch.empty(length, b, 2 * (2 + 2) * 16, dtype=BF16, device=device, requires_grad=True)
    context = flex_body(mixed, 2, 2, 16, 0.25, torch.empty(4, device=device), ends, blocks)
    assert context.shape == (length, b, 64) and context.dtype == BF16
    (gradient,) = torch.autograd.grad(context, mixed, torch.empty_like(context))
    assert gradient.shape == mixed.shape and gradient.dtype == BF16
