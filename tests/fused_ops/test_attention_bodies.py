"""Which body computes attention, and that each computes the same: SDPA and FlexAttention against the scored path, in
float64.

FlexAttention refuses gradients on a CPU in a check of its own, before it looks at anything else. Without the check its
eager form has them, so that all but the code generated for CUDA is tested here; tests/gpu/test_attention.py tests that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as torchs

from fused_ops import attention
from fused_ops.attention import causal_attention, sdpa, selection
from fused_ops.attention import flex as attention_flex
from fused_ops.attention import trial as attention_trial
from fused_ops.attention.cudnn import CudnnCase, cudnn_refusal, versions
from fused_ops.attention.flex import BLOCK, causal_blocks, flex_attention, flex_body, visible_blocks
from fused_ops.attention.reach import EVERYTHING, Reach, with_chunks
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import CUDNN, FLASH, efficient_attention, flash_attention, heads_of
from fused_ops.attention.selection import (
    ASKED,
    NOTHING_TRIED,
    ORDER,
    AttentionCase,
    AttentionSupport,
    Body,
    choose,
    obstacle,
)
from fused_ops.attention.trial import AttentionWorkload, choices, find_support, find_supports, problem
from fused_ops.softmax import alibi_slopes

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
READY = AttentionSupport(length=512, flex="")


def case(dtype: torch.dtype = BF16, head_dim: int = 64, length: int = 512, **facts: Any) -> AttentionCase:
    given: dict[str, Any] = {"kind": "cuda", "capability": (9, 0), **facts}
    return AttentionCase(dtype=dtype, head_dim=head_dim, length=length, **given)


CPU: dict[str, Any] = {"kind": "cpu", "capability": None}
RULE = [
    # What is asked, what there is, what runs, and a word of the reason.
    (case(**CPU, kernel=True), READY, Body.KERNEL, "the first choice"),
    (case(**CPU, kernel=True, alibi=True, documents=True), READY, Body.KERNEL, "the first choice"),
    (case(**CPU, kernel=True, dropout=True), READY, Body.SOFTMAX, "no C\\+\\+ kernel: it draws no dropout"),
    (case(FP64, **CPU), READY, Body.FLASH, "none for this device and dtype"),
    (case(FP64, **CPU, alibi=True), READY, Body.SOFTMAX, "ALiBi.*CUDA only"),
    (case(), READY, Body.FLASH, "no C\\+\\+ kernel.*; not cuDNN's: it was not tried in this process$"),
    (case(), replace(READY, cudnn=""), Body.FLASH, "no C\\+\\+ kernel.*; cuDNN's$"),
    (case(), replace(READY, cudnn="", asked="flash"), Body.FLASH, "asks; cuDNN's$"),
    (case(FP16, 256), READY, Body.FLASH, "no C"),
    (case(FP16, 264), READY, Body.EFFICIENT, "heads of up to 256"),
    (case(FP32), READY, Body.EFFICIENT, "bf16 and fp16 only"),
    (case(FP32, 20), READY, Body.SOFTMAX, "multiple of 8.*blocks of 16"),
    (case(FP64), READY, Body.SOFTMAX, "no fp64"),
    (case(alibi=True), READY, Body.FLEX, "no place for ALiBi"),
    (case(documents=True), READY, Body.FLEX, "knows no documents"),
    (case(head_dim=80, alibi=True, documents=True), READY, Body.FLEX, "ALiBi"),
    (case(head_dim=8, alibi=True), READY, Body.SOFTMAX, "heads of 16 to 256"),
    (case(alibi=True, dropout=True), READY, Body.SOFTMAX, "FlexAttention, compiled: it draws no dropout"),
    (case(dropout=True), READY, Body.SOFTMAX, "same on every layout"),
    (case(**CPU, kernel=True, window=64, documents=True, cap=50.0), READY, Body.KERNEL, "the first choice"),
    (case(**CPU, kernel=True, chunk=64), READY, Body.KERNEL, "the first choice"),
    (case(FP64, **CPU, window=64), READY, Body.SOFTMAX, "flash attention: it knows no windows"),
    (case(window=64), READY, Body.FLEX, "efficient attention: it knows no windows; no the package"),
    (case(chunk=64), READY, Body.FLEX, "flash attention: it knows no chunks"),
    (case(cap=50.0), READY, Body.FLEX, "no place for a cap"),
    (case(window=64), replace(READY, package=""), Body.PACKAGE, "it knows no windows$"),
    (case(cap=50.0, window=64, alibi=True), replace(READY, package=""), Body.PACKAGE, "ALiBi"),
    (case(chunk=64), replace(READY, package=""), Body.FLEX, "the package flash_attn: it knows no chunks"),
    (case(window=64, documents=True), replace(READY, package=""), Body.FLEX, "flash_attn: it knows no documents"),
    (case(window=64, dropout=True), READY, Body.SOFTMAX, "it draws no dropout"),
    (case(FP32, alibi=True), READY, Body.SOFTMAX, "blocks of 16"),
    (case(FP64, alibi=True), READY, Body.SOFTMAX, "fp64"),
    (case(length=127, alibi=True), READY, Body.SOFTMAX, "shorter than one of its blocks"),
    (case(alibi=True), NOTHING_TRIED, Body.SOFTMAX, "not tried in this process"),
    (case(alibi=True), replace(READY, flex="triton is missing"), Body.SOFTMAX, "triton is missing"),
    (case(), replace(READY, flash="no such symbol"), Body.EFFICIENT, "no such symbol"),
    (case(FP16, capability=(7, 0)), READY, Body.EFFICIENT, "capability 8.0"),
    (case(BF16, capability=(7, 0)), READY, Body.FLEX, "capability 8.0"),
    # Without gradients: FlexAttention at the run's own length only.
    (case(alibi=True, recorded=False), READY, Body.FLEX, "ALiBi"),
    (case(alibi=True, recorded=False, length=256), READY, Body.SOFTMAX, "own sequence length"),
    (case(recorded=False, length=64), READY, Body.FLASH, "no C"),
    # Forced.
    (case(**CPU, kernel=True), replace(READY, asked="softmax"), Body.SOFTMAX, "--attention softmax asks"),
    (case(**CPU, kernel=True), replace(READY, asked="flash"), Body.FLASH, "--attention flash asks"),
    (case(), replace(READY, asked="flex"), Body.FLEX, "--attention flex asks"),
    (case(FP32, alibi=True), replace(READY, asked="flex"), Body.FLEX, "asks"),
    (case(length=64, alibi=True), replace(READY, asked="flex"), Body.FLEX, "asks"),
    (case(alibi=True, recorded=False, length=256), replace(READY, asked="flex"), Body.SOFTMAX, "own sequence length"),
    (case(**CPU, kernel=True, alibi=True, recorded=False), replace(READY, asked="flex"), Body.KERNEL, "first choice"),
]


@pytest.mark.parametrize(("asked", "support", "body", "reason"), RULE)
def test_the_rule(asked: AttentionCase, support: AttentionSupport, body: Body, reason: str) -> None:
    found = choose(asked, support)
    assert found.body is body
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("slow", [True, False])
def test_flash_on_a_cpu_that_multiplies_16_bits_slowly(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto leaves it out for 16 bits; who asks for it gets it."""
    monkeypatch.setattr(selection, "lacks", lambda dtype: slow and dtype == BF16)
    decide = choose.__wrapped__  # the cache has this machine's answers
    chosen = decide(case(**CPU), READY)
    assert chosen.body is (Body.SOFTMAX if slow else Body.FLASH) and ("slow on this processor" in chosen.reason) == slow
    assert decide(case(FP32, **CPU), READY).body is Body.FLASH
    assert decide(case(**CPU), replace(READY, asked="flash")).body is Body.FLASH


@pytest.mark.parametrize(
    ("asked", "forced", "reason"),
    [
        (case(alibi=True), "flash", "ALiBi"),
        (case(documents=True), "flash", "documents"),
        (case(FP32), "flash", "bf16 and fp16 only"),
        (case(FP64), "flash", "bf16 and fp16 only"),
        (case(head_dim=512), "flash", "up to 256"),
        (case(dropout=True), "flash", "dropout"),
        (case(dropout=True), "flex", "dropout"),
        (case(FP64), "flex", "fp64"),
        (case(**CPU), "flex", "CUDA only"),
    ],
)
def test_a_forced_body_that_cannot_is_an_error(asked: AttentionCase, forced: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--attention {forced} cannot run: .*{reason}"):
        choose(asked, replace(READY, asked=forced))


def test_softmax_computes_everything_and_is_last() -> None:
    assert ORDER[-1] is Body.SOFTMAX and set(ASKED.values()) <= set(ORDER)
    several: list[dict[str, Any]] = [{}, {"alibi": True, "documents": True, "dropout": True}, {"recorded": False}]
    for facts in several:
        for dtype in (BF16, FP32, FP64):
            assert obstacle(Body.SOFTMAX, case(dtype, 7, 9, **facts), NOTHING_TRIED) is None


# Bodies against the scored path.


@pytest.fixture
def with_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention in eager, where it works on a CPU and in fp64, gradients included."""
    monkeypatch.setattr(torchs, "_validate_device", lambda query, key, value: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(
    body: Callable[..., Tensor], s: int, b: int, groups: int, repeats: int, d: int, **options: Any
) -> list[Tensor]:
    """Context and the projection's gradient, in float64."""
    draw = torch.Generator().manual_seed(s)
    mixed = torch.randn(s, b, groups * (repeats + 2) * d, generator=draw, dtype=FP64).requires_grad_()
    weight = torch.randn(s, b, groups * repeats * d, generator=draw, dtype=FP64)
    context = body(mixed, groups, repeats, d, scale=1 / math.sqrt(d), **options)
    return [context.detach(), *torch.autograd.grad(context, mixed, weight)]


def options(s: int, b: int, heads: int, sloped: bool, run: int, shard: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Slopes of a shard of the heads of a model, and documents of up to about `run` positions, other ones in each
    sample.
    """
    rank, size = shard
    slopes = torch.tensor(alibi_slopes(heads * size)[rank * heads : (rank + 1) * heads], dtype=FP64)
    starts = torch.rand(b, s, generator=torch.Generator().manual_seed(s)) < 1 / max(run, 1)
    return {"slopes": slopes if sloped else None, "documents": starts.long().cumsum(1) if run else None}


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def in_eager(
    mixed: Tensor,
    groups: int,
    repeats: int,
    d: int,
    *,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
) -> Tensor:
    documents = with_chunks(documents, reach.chunk, mixed)
    blocks = visible_blocks(mixed.shape[0], documents, mixed.device, reach.window)
    bounds = {"window": reach.window, "cap": cap}
    return flex_body(mixed, groups, repeats, d, scale, slopes, documents, blocks, **bounds)  # type: ignore[arg-type]


SHAPES = [(1, 1, 1, 1, 8), (50, 2, 3, 2, 20), (130, 1, 6, 1, 16), (257, 2, 1, 3, 8), (256, 1, 5, 1, 8)]


@pytest.mark.few(cases=2)
@pytest.mark.sampled
@pytest.mark.parametrize("run", [0, 1, 40, 300])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_equals_the_scored_path(shape: tuple[int, ...], sloped: bool, run: int, with_gradients: None) -> None:
    given = options(shape[0], shape[1], shape[2] * shape[3], sloped, run)
    agree(results(in_eager, *shape, **given), results(reference_attention, *shape, **given))


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("run", [0, 40])
@pytest.mark.parametrize("reach", [*map(Reach, (1, 30, 128, 150, 300)), Reach(chunk=100), EVERYTHING], ids=str)
def test_flex_with_windows_chunks_and_caps(reach: Reach, run: int, cap: float | None, with_gradients: None) -> None:
    """With three blocks, so that one is beyond each window but the last."""
    given = options(300, 2, 4, True, run) | {"reach": reach, "cap": cap}
    agree(results(in_eager, 300, 2, 2, 2, 8, **given), results(reference_attention, 300, 2, 2, 2, 8, **given))


def test_flex_is_called_with_the_window(with_gradients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks of one document, which are cached by their window, and with those of several."""
    monkeypatch.setattr(attention_flex, "compiled_for", lambda function, *signature: function)
    for reach, run in ((Reach(100), 0), (Reach(100), 60), (Reach(20), 0), (Reach(chunk=100), 0), (EVERYTHING, 0)):
        given = options(300, 2, 4, True, run) | {"reach": reach, "cap": 1.5}
        agree(results(flex_attention, 300, 2, 2, 2, 8, **given), results(reference_attention, 300, 2, 2, 2, 8, **given))


def test_torch_still_refuses_gradients_on_a_cpu() -> None:
    """Once it does not, the rule may let FlexAttention train on CPUs."""
    query = torch.randn(1, 1, 8, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torchs.flex_attention(query, query, query)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_flex_with_the_slopes_of_a_shard(rank: int, with_gradients: None) -> None:
    """Four of the twelve heads of a model, which is no power of two."""
    given = options(70, 2, 4, True, 0, (rank, 3))
    ours = results(in_eager, 70, 2, 4, 1, 8, **given)
    agree(ours, results(reference_attention, 70, 2, 4, 1, 8, **given))
    others = results(in_eager, 70, 2, 4, 1, 8, **options(70, 2, 4, True, 0, ((rank + 1) % 3, 3)))
    assert (ours[0] - others[0]).abs().max() > 1e-3


@pytest.mark.slow
def test_flex_traces_whole_and_once_for_other_documents(with_gradients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled for CUDA, up to the generated code: one graph with its backward and one of the blocks, whatever the
    documents are; recomputed, too.
    """
    compiled = cache(partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(attention_flex, "compiled_for", lambda function, *signature: compiled(function))
    torch._dynamo.utils.counters.clear()

    def recomputed(mixed: Tensor, *heads: int, **given: Any) -> Tensor:
        found = torch.utils.checkpoint.checkpoint(
            flex_attention, mixed, *heads, use_reentrant=False, preserve_rng_state=False, **given
        )
        assert isinstance(found, Tensor)
        return found

    for seed, body in ((30, flex_attention), (50, flex_attention), (90, recomputed)):
        given = options(200, 2, 4, True, seed)
        agree(results(body, 200, 2, 2, 2, 16, **given), results(reference_attention, 200, 2, 2, 2, 16, **given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_flex_takes_more_shapes_than_torch_compiles_of_one_function(
    with_gradients: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses the ninth compilation of one function. A program has prompts of more lengths than that."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for length in range(40, 40 + torch._dynamo.config.recompile_limit + 2):
        given = options(length, 2, 4, True, 30)
        ours = results(flex_attention, length, 2, 2, 2, 16, **given)
        agree(ours, results(reference_attention, length, 2, 2, 2, 16, **given))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [True, False])
def test_the_compiler_does_not_choose_the_strides_of_the_blocks(
    gradients: bool, with_gradients: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernel takes the lists of blocks for contiguous. So they are inputs of the graph that it is in, with
    those strides, even where an axis has one entry.
    """
    found: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        given = dict(zip((node.name for node in graph.graph.nodes if node.op == "placeholder"), inputs, strict=True))
        for node in graph.graph.nodes:
            if node.op == "call_function" and "flex_attention" in str(node.target):
                lists = [each for each in node.args[4] if isinstance(each, torch.fx.Node) and each.op != "get_attr"]
                found.extend(
                    (each.op, tuple(given[each.name].shape), given[each.name].stride())
                    if each.name in given
                    else (each.op, (), ())
                    for each in lists
                )
        return graph.forward

    torch._dynamo.reset()
    compiled = cache(partial(torch.compile, dynamic=False, fullgraph=True, backend=look))
    monkeypatch.setattr(attention_flex, "compiled_for", lambda function, *signature: compiled(function))
    given = options(300, 2, 4, True, 60)
    mixed = torch.randn(300, 2, 4 * 3 * 16, dtype=FP64, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        flex_attention(mixed, 4, 1, 16, scale=0.25, **given)
    assert [op for op, _, _ in found] == ["placeholder"] * 8
    for _, shape, strides in found:
        assert strides == torch.empty(shape).stride()


@pytest.mark.parametrize("length", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK, 300, 640, 1000])
@pytest.mark.parametrize("share", [0, 0.002, 0.02, 0.5])
@pytest.mark.parametrize("window", [None, 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK - 1, 2 * BLOCK, 400])
@pytest.mark.few(cases=32)
def test_blocks_are_those_that_torch_finds_by_looking_at_every_pair(
    length: int, share: float, window: int | None
) -> None:
    documents = (torch.rand(3, length, generator=torch.Generator().manual_seed(length)) < share).long().cumsum(1)

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (documents[b, q] == documents[b, k])
        return seen if window is None else seen & (q - k < window)

    theirs = torchs.create_block_mask(within, 3, None, length, length, device="cpu")
    ours = visible_blocks(length, documents, torch.device("cpu"), window)
    names = [
        f"{full}{side}_{kind}" for side in ("kv", "q") for full in ("", "full_") for kind in ("num_blocks", "indices")
    ]
    found = dict(zip(names, ours, strict=True))
    for name in names[::2]:
        assert torch.equal(found[name], getattr(theirs, name))
        indices = name.replace("num_blocks", "indices")
        mine, other = found[indices], getattr(theirs, indices)
        assert mine.shape == other.shape and mine.dtype == other.dtype
        for row, also, count in zip(
            mine.flatten(0, 2), other.flatten(0, 2), found[name].flatten().tolist(), strict=True
        ):
            assert sorted(row[:count].tolist()) == sorted(also[:count].tolist())
    if share == 0:
        assert all(
            torch.equal(one[:1], other)
            for one, other in zip(ours, causal_blocks(length, torch.device("cpu"), window), strict=True)
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("body", [flash_attention, efficient_attention])
def test_sdpa_equals_the_scored_path(
    shape: tuple[int, ...], body: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_ops.attention.sdpa.EFFICIENT", ())  # on a CPU torch chooses
    agree(results(body, *shape), results(reference_attention, *shape, slopes=None, documents=None))


def test_queries_keys_and_values_are_views_and_their_gradients_join_in_one_pass() -> None:
    """No copy on the way in; on the way back one `cat`, and no zero-filled copy of the projection per slice."""
    mixed = torch.randn(12, 2, 3 * 3 * 8, requires_grad=True)
    heads = heads_of(mixed, 3, 1, 8)
    assert all(tensor.untyped_storage().data_ptr() == mixed.untyped_storage().data_ptr() for tensor in heads)
    made: list[str] = []

    class Made(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.numel() == mixed.numel() and not result._is_view():
                made.append(str(func))
            return result

    with Made():
        torch.autograd.grad(heads, mixed, [torch.ones_like(tensor) for tensor in heads])
    assert [name for name in made if "view" not in name] == ["aten.cat.default"]


# The dispatch, and what a machine offers.


@pytest.mark.parametrize(
    ("asked", "dtype", "sloped", "dropped", "expected"),
    [
        ("auto", FP64, False, False, "flash_attention"),
        ("auto", FP64, True, False, "reference_attention"),
        ("softmax", FP32, False, False, "reference_attention"),
        ("softmax", FP64, False, False, "reference_attention"),
        ("flash", FP32, False, False, "flash_attention"),
        ("auto", FP32, False, True, "reference_attention"),
    ],
)
def test_the_chosen_body_runs(
    asked: str, dtype: torch.dtype, sloped: bool, dropped: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def counted(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def body(*args: Any, **kwargs: Any) -> Tensor:
            called.append(name)
            return original(*args, **kwargs)

        return body

    for name in ("flash_attention", "efficient_attention", "flex_attention", "reference_attention", "kernel_attention"):
        monkeypatch.setattr(attention, name, counted(name, getattr(attention, name)))
    mixed = torch.randn(20, 2, 2 * 3 * 8, dtype=dtype, requires_grad=True)
    slopes = torch.tensor(alibi_slopes(2)) if sloped else None
    dropout = (lambda probabilities: probabilities * 1.0) if dropped else None
    out = causal_attention(
        mixed, 2, 1, 8, scale=0.3, slopes=slopes, documents=None, dropout=dropout, support=AttentionSupport(asked)
    )
    out.sum().backward()
    assert called == [expected]


def test_the_offer_of_a_cpu_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_trial, "failure", lambda *_: pytest.fail("tried"))
    workload, cpu = AttentionWorkload(FP64, 64, 1, 2, 1, 8), torch.device("cpu")
    assert choose(workload.case(cpu), find_support("auto", workload, cpu)).body is Body.FLASH
    with pytest.raises(ValueError, match="--attention flex cannot run: it has a backward on CUDA only"):
        find_support("flex", workload, cpu)
    assert problem("flex", workload, cpu) == "it has a backward on CUDA only"
    assert problem("auto", workload, cpu) is None and problem("flash", workload, cpu) is None


@pytest.mark.parametrize(
    ("alibi", "failing", "body", "tried"),
    [
        (True, set(), Body.FLEX, ["flex"]),
        (False, set(), Body.FLASH, ["cudnn", "flash"]),
        (True, {"flex"}, Body.SOFTMAX, ["flex"]),
        (False, {"cudnn"}, Body.FLASH, ["cudnn", "flash"]),
        (False, {"flash"}, Body.EFFICIENT, ["cudnn", "flash", "efficient"]),
        (False, {"flash", "efficient"}, Body.FLEX, ["cudnn", "flash", "efficient", "flex"]),
        (False, {"flash", "efficient", "flex"}, Body.SOFTMAX, ["cudnn", "flash", "efficient", "flex"]),
    ],
)
def test_what_fails_in_the_trial_is_not_chosen(
    alibi: bool, failing: set[str], body: Body, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that this machine need not have: what would run is tried, once, and where it fails
    the next is taken.
    """
    asked: list[str] = []
    used: list[tuple[SDPBackend, ...]] = []

    def tries(function: Any, workload: AttentionWorkload, device: torch.device) -> str:
        body, backends = function.args[0], function.args[-1]
        name = "cudnn" if body is Body.FLASH and backends == CUDNN else str(body.name).lower()
        asked.append(name)
        used.append(backends)
        return "it fails here" if name in failing else ""

    monkeypatch.setattr(attention_trial, "failure", tries)
    on_hopper(monkeypatch)
    monkeypatch.setattr(attention_trial, "find_spec", lambda name: object())
    find_support.cache_clear()
    workload, card = AttentionWorkload(BF16, 512, 1, 2, 1, 64, alibi=alibi), torch.device("cuda", 0)
    support = find_support("auto", workload, card)
    found = choose(workload.case(card), support)
    assert found.body is body and asked == tried
    assert ("it fails here" in found.reason) == bool(failing)
    if body is Body.FLASH:
        assert used[-1] == (FLASH if failing else CUDNN + FLASH), "what is tried is what runs"
        assert found.reason.endswith("; not cuDNN's: it fails here" if failing else "; cuDNN's")
    if not alibi and not failing:  # nobody has tried FlexAttention, so evaluation does not either
        assert support.flex == AttentionSupport.flex
    if failing == {"flex"}:
        find_support.cache_clear()
        with pytest.raises(ValueError, match="--attention flex cannot run: it fails here"):
            find_support("flex", workload, card)
    find_support.cache_clear()


def test_layers_of_several_kinds_have_bodies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried with its window and cap, and what fails for one kind still computes the others."""
    asked: list[tuple[str, str]] = []

    def tries(function: Any, workload: AttentionWorkload, device: torch.device) -> str:
        asked.append((function.args[0].name, workload.words))
        return "it fails here" if workload.cap and function.args[0] is Body.FLEX else ""

    monkeypatch.setattr(attention_trial, "failure", tries)
    on_hopper(monkeypatch)
    monkeypatch.setattr(attention_trial, "find_spec", lambda name: object())
    find_support.cache_clear()
    card, plain = torch.device("cuda", 0), AttentionWorkload(BF16, 512, 1, 2, 1, 64)
    capped = replace(plain, reach=Reach(chunk=64), cap=30.0)
    workloads = (plain, replace(plain, reach=Reach(100)), capped, replace(plain, reach=Reach(512)))
    support = find_supports("auto", workloads, card)
    bodies = {words: choice.body for words, choice in choices(workloads, card, support).items()}
    assert bodies == {
        "": Body.FLASH,
        "a window of 100": Body.FLEX,
        "chunks of 64 and scores up to 30": Body.SOFTMAX,
    }, "a window of the whole sequence is none"
    assert set(asked[:2]) == {("FLASH", "")} and asked[2:4] == [
        ("FLEX", "a window of 100"),
        ("FLEX", "chunks of 64 and scores up to 30"),
    ]
    for recorded in (False, True):
        other = [choose(replace(each.case(card), recorded=recorded), support).body for each in workloads]
        assert other == [Body.FLASH, Body.FLEX, Body.SOFTMAX, Body.FLASH]
    with pytest.raises(ValueError, match="--attention flash cannot run: it knows no windows"):
        find_supports("flash", workloads, card)
    assert list(choices(workloads[::3], card, support)) == [""] == list(choices(workloads[:1], card, support))
    assert find_supports("auto", workloads[:1], card) == find_support("auto", plain, card)
    find_support.cache_clear()


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of compute capability 9.0, with versions at which cuDNN's attention has no known fault."""
    for module in (attention_trial, sdpa):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "versions", lambda: ((13, 0), 92000))
    sdpa.flash_backends.cache_clear()


HOPPER = CudnnCase(capability=(9, 0), cuda=(12, 9), cudnn=91501, groups=4, length=500)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"capability": (8, 0)}, "as fast"),
        ({"capability": (12, 0)}, "as fast"),
        ({"cuda": (12, 8)}, "CUDA before 12.9"),
        ({"cuda": (0, 0)}, "CUDA before 12.9"),
        ({"cuda": (13, 0)}, None),
        ({"capability": (10, 0)}, "fewer than 8 key-value heads"),
        ({"capability": (10, 3), "groups": 7}, "fewer than 8 key-value heads"),
        ({"capability": (10, 0), "groups": 8}, None),
        ({"cudnn": 91500}, "9.15.1"),
        ({"cudnn": 90800}, "9.15.1"),
        ({"cudnn": 91500, "length": 512}, None),
    ],
)
def test_cudnn_computes_where_it_has_no_known_fault(
    change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(HOPPER, **change)
    refusal = cudnn_refusal(given)
    assert refusal is None if reason is None else re.search(reason, refusal or "")
    monkeypatch.setattr(sdpa, "capability", lambda device: given.capability)
    monkeypatch.setattr(sdpa, "versions", lambda: (given.cuda, given.cudnn))
    sdpa.flash_backends.cache_clear()
    card = torch.device("cuda", 0)
    assert sdpa.flash_backends(card, given.groups, given.length, True) == (CUDNN + FLASH if reason is None else FLASH)
    assert sdpa.flash_backends(card, given.groups, given.length, False) == FLASH, "it was not tried, or failed"
    sdpa.flash_backends.cache_clear()


def test_a_known_fault_of_cudnn_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    monkeypatch.setattr(attention_trial, "versions", lambda: ((12, 8), 92000))
    monkeypatch.setattr(attention_trial, "failure", lambda *_: pytest.fail("tried"))
    why = attention_trial._cudnn_failure(AttentionWorkload(BF16, 512, 1, 2, 1, 64), torch.device("cuda", 0))
    assert "CUDA before 12.9" in why


@pytest.mark.parametrize(("said", "known"), [("12.8", (12, 8)), ("13.0", (13, 0)), ("13", (13, 0)), (None, (0, 0))])
def test_versions_are_those_of_torch(said: str | None, known: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", said)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert versions() == (known, 91900)


@pytest.mark.parametrize(
    ("cuda", "hip", "body"),
    [
        ("13.0", None, Body.SOFTMAX),
        (None, "6.4.43484", Body.SOFTMAX),
        (None, None, Body.FLEX),
    ],
)
def test_a_torch_for_cards_without_triton_has_no_flex(
    cuda: str | None, hip: str | None, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it for CUDA or for ROCm. A torch for processors never has it, and a plan that is made with it is of a machine
    with cards.
    """
    monkeypatch.setattr(attention_trial, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = choose(case(alibi=True), attention_trial.static_support("auto", 512))
    assert found.body is body and ("triton" in found.reason) == (body is Body.SOFTMAX)
