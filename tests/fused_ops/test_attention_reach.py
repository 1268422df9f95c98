"""Windows, chunks and caps: the reference and the CPU kernel against dense masks in float64 that share no code, and
transformers' masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.attention import causal_attention
from fused_ops.attention.reach import EVERYTHING, Reach, with_chunks
from fused_ops.attention.reference import reference_attention
from fused_ops.native import library
from fused_ops.softmax import alibi_slopes
from tests.fused_ops.levels import DTYPES, cpu_level, drawn, the_same_for_any_threads

__all__ = ["cpu_level"]
FP64 = torch.float64
ALLOWED = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2, FP64: 1e-13}
"""Of the error's norm, relative to the result's."""
NONE: dict[str, Any] = {"scale": 0.7, "slopes": None, "documents": None}


def seen(s: int, reach: Reach, documents: Tensor | None, b: int) -> Tensor:
    """Which key a query sees, bool [b, query, key], by a list of the keys of every query."""
    mask = torch.zeros(b, s, s, dtype=torch.bool)
    for q in range(s):
        first = 0
        if reach.window is not None:
            first = max(0, q - reach.window + 1)
        if reach.chunk is not None:
            first = q - q % reach.chunk
        mask[:, q, first : q + 1] = True
    if documents is not None:
        for sample in range(b):
            for number in documents[sample].unique():
                others = documents[sample] != number
                mask[sample, documents[sample] == number] &= ~others
    return mask


def dense(
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
    """Head by head, in whole matrices."""
    s, b, _ = mixed.shape
    heads, mask, position = mixed.view(s, b, groups, repeats + 2, d), seen(s, reach, documents, b), torch.arange(s)
    context = []
    for group in range(groups):
        for r in range(repeats):
            query, key, value = (heads[:, :, group, slot].transpose(0, 1) for slot in (r, repeats, repeats + 1))
            scores = query @ key.mT * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores = scores + slopes[group * repeats + r].double() * position.double()
            context.append(torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ value)
    return torch.stack(context, dim=2).transpose(0, 1).reshape(s, b, -1)


def inputs(s: int, b: int, heads: tuple[int, int, int], *, sloped: bool, run: int) -> tuple[Tensor, dict[str, Any]]:
    groups, repeats, d = heads
    starts = torch.rand(b, s, generator=torch.Generator().manual_seed(s)) < 1 / max(run, 1)
    return drawn(s, b, groups * (repeats + 2) * d, seed=s, dtype=FP64), {
        "scale": 0.7,
        "slopes": torch.tensor(alibi_slopes(groups * repeats)) if sloped else None,
        "documents": starts.long().cumsum(1) if run else None,
    }


def results(body: Callable[..., Tensor], mixed: Tensor, heads: tuple[int, int, int], **options: Any) -> list[Tensor]:
    """Context and gradient of the projection."""
    leaf = mixed.clone().requires_grad_()
    context = body(leaf, *heads, **options)
    weight = drawn(*context.shape, seed=7, dtype=mixed.dtype)
    return [context.detach(), *torch.autograd.grad(context, leaf, weight)]


def check(body: Callable[..., Tensor], mixed: Tensor, heads: tuple[int, int, int], **options: Any) -> None:
    exact_options = options | {"slopes": None if options["slopes"] is None else options["slopes"].double()}
    options = exact_options if mixed.dtype == FP64 else options
    exact = results(dense, mixed.double(), heads, **exact_options)
    for ours, theirs in zip(results(body, mixed, heads, **options), exact, strict=True):
        assert ours.dtype == mixed.dtype and ours.shape == theirs.shape and ours.isfinite().all()
        assert (ours.double() - theirs).norm() <= ALLOWED[mixed.dtype] * theirs.norm()


REACHES = [
    *(Reach(window=width) for width in (1, 2, 31, 64, 100, 256, 299, 300, 301, 2**40)),
    *(Reach(chunk=width) for width in (1, 7, 32, 128, 299, 300, 2**40)),
]
KINDS = [(None, False, 0), (2.0, False, 0), (None, True, 60), (2.0, True, 60)]
"""cap, whether there are slopes, length of documents."""


@pytest.mark.few(cases=8)
@pytest.mark.parametrize(("cap", "sloped", "run"), KINDS)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_the_kernel_equals_dense_masks(reach: Reach, cap: float | None, sloped: bool, run: int) -> None:
    heads = 2, 2, 20
    mixed, options = inputs(300, 2, heads, sloped=sloped, run=run)
    for dtype in DTYPES:
        check(causal_attention, mixed.to(dtype), heads, **options, reach=reach, cap=cap)


@pytest.mark.few(cases=4)
@pytest.mark.parametrize(("cap", "sloped", "run"), KINDS)
@pytest.mark.parametrize(
    "reach", [EVERYTHING, *(reach for reach in REACHES if reach.width in (1, 7, 31, 64, 2**40))], ids=str
)
def test_the_reference_equals_dense_masks(reach: Reach, cap: float | None, sloped: bool, run: int) -> None:
    heads = 2, 3, 6
    mixed, options = inputs(65, 2, heads, sloped=sloped, run=run and 9)
    check(reference_attention, mixed, heads, **options, reach=reach, cap=cap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_every_level(cpu_level: str, dtype: torch.dtype) -> None:
    heads = 1, 2, 33
    for s, reach, cap in ((5, Reach(2), 1.5), (600, Reach(170), 3.0), (600, Reach(chunk=170), 0.5)):
        mixed, options = inputs(s, 2, heads, sloped=True, run=200)
        check(causal_attention, mixed.to(dtype), heads, **options, reach=reach, cap=cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("s", "window"), [(1700, 40), (1301, 257), (2100, 700)])
def test_sequences_of_many_windows(s: int, window: int, dtype: torch.dtype) -> None:
    """So long that packed keys and queries take the places of others, in several rounds, also within a tile."""
    heads = 1, 2, 16
    mixed, options = inputs(s, 1, heads, sloped=True, run=900)
    check(causal_attention, mixed.to(dtype), heads, **options, reach=Reach(window))


@pytest.mark.parametrize("cap", [0.01, 5.0, 50.0, 1e6])
def test_a_cap_bounds_scores_of_any_size(cap: float) -> None:
    """From scores far above the cap to scores far below it, where an absolute error of tanh is a large one."""
    heads, s = (1, 1, 16), 40
    for factor in (1e-3, 1.0, 10.0) if cap < 1e3 else (1e-3, 1.0):  # large scores lose digits without a cap
        mixed = drawn(s, 1, 48, seed=5, dtype=torch.float32)
        mixed[:, :, :32] *= factor
        check(causal_attention, mixed, heads, **NONE, cap=cap)


def test_a_cap_takes_infinite_scores() -> None:
    """An infinite score is the cap, and a NaN stays one."""
    mixed = drawn(40, 1, 48, seed=5, dtype=torch.float32).abs()
    mixed[10, 0, 16] = math.inf
    context = causal_attention(mixed, 1, 1, 16, **NONE, cap=3.0)
    torch.testing.assert_close(context.double(), dense(mixed.double(), 1, 1, 16, **NONE, cap=3.0), rtol=1e-5, atol=1e-6)
    mixed[10, 0, 17] = math.nan
    assert (
        causal_attention(mixed, 1, 1, 16, **NONE, cap=3.0).isnan().any(2).flatten().tolist()
        == [False] * 10 + [True] * 30
    )


def test_dropout_with_a_window_and_a_cap() -> None:
    """The probabilities that dropout gets are those of the dense mask; dropped ones leave no gradient."""
    heads, s = (1, 2, 8), 30
    mixed, options = inputs(s, 2, heads, sloped=True, run=0)
    kept = (torch.rand(2, 2, s, s, generator=torch.Generator().manual_seed(1)) < 0.6).double()
    shown: list[Tensor] = []

    def dropout(probabilities: Tensor) -> Tensor:
        shown.append(probabilities.detach().clone())
        return probabilities * kept

    options["slopes"] = options["slopes"].double()
    leaf = mixed.clone().requires_grad_()
    context = causal_attention(leaf, *heads, **options, reach=Reach(4), cap=2.0, dropout=dropout)
    query, key, value = (leaf.view(s, 2, 4, 8)[:, :, slots].permute(1, 2, 0, 3) for slots in ([0, 1], [2, 2], [3, 3]))
    bias = options["slopes"].view(2, 1, 1) * torch.arange(s)
    scores = (2 * torch.tanh(query @ key.mT * 0.7 / 2) + bias).masked_fill(~seen(s, Reach(4), None, 1), -math.inf)
    probabilities = scores.softmax(-1)
    exact = ((probabilities * kept) @ value).permute(2, 0, 1, 3).reshape(s, 2, -1)
    torch.testing.assert_close(shown[0], probabilities.detach(), rtol=1e-11, atol=1e-12)
    weight = drawn(*exact.shape, seed=3, dtype=FP64)
    for ours, theirs in zip(
        (context, *torch.autograd.grad(context, leaf, weight)),
        (exact, *torch.autograd.grad(exact, leaf, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("width", [1, 3, 16, 40])
def test_masks_are_those_of_transformers(width: int) -> None:
    """Each query's keys, read off the context of values that name their position."""
    masks = pytest.importorskip("transformers.masking_utils")
    s = 40
    theirs = {
        Reach(window=width): masks.sliding_window_causal_mask_function(width),
        Reach(chunk=width): masks.chunked_causal_mask_function(width, torch.zeros(1, dtype=torch.int64)),
    }
    q, k = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
    zero = torch.zeros_like(q)
    mixed = torch.zeros(s, 1, 3 * s)
    mixed[:, 0, 2 * s :] = torch.eye(s)
    for reach, mask in theirs.items():
        for body in (causal_attention, reference_attention):
            context = body(mixed, 1, 1, s, **NONE, reach=reach)
            assert torch.equal(context[:, 0] > 0, mask(zero, zero, q, k).bool())


@pytest.mark.parametrize(("s", "reach"), [(700, Reach(150)), (1700, Reach(150)), (700, Reach(chunk=150))], ids=str)
@pytest.mark.parametrize(("b", "groups", "repeats"), [(1, 1, 3), (3, 3, 1)])
def test_the_same_bits_for_any_number_of_threads(b: int, groups: int, repeats: int, s: int, reach: Reach) -> None:
    heads = groups, repeats, 16
    mixed, options = inputs(s, b, heads, sloped=True, run=400)
    mixed = mixed.to(torch.bfloat16)
    the_same_for_any_threads(
        lambda: results(causal_attention, mixed, heads, **options, reach=reach, cap=2.0), (1, 2, 3, 8)
    )


def test_keys_outside_a_window_are_not_computed() -> None:
    """A NaN outside of every block that a query's window touches would else reach the products of that block."""
    mixed = drawn(2048, 1, 48, seed=5, dtype=torch.float32)
    if library.matrix_kernels(mixed) is None:
        pytest.skip("no compiler, no kernels")
    mixed[0, 0, 32:] = math.nan  # the values of the first position: a weight of 0 times NaN is NaN
    leaf = mixed.requires_grad_()
    context = causal_attention(leaf, 1, 1, 16, **NONE, reach=Reach(64))
    assert context[:64].isnan().all() and context[512 + 64 :].isfinite().all()
    (gradient,) = torch.autograd.grad(context[1024:].sum(), leaf)
    assert gradient[1024:].isfinite().all()


def test_what_no_layer_can_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="window=4, chunk=5; set one of them"):
        Reach(4, 5)
    for given in ({"window": 0}, {"chunk": -1}):
        name, width = next(iter(given.items()))
        with pytest.raises(ValueError, match=f"{name}={width}: .* 1 or more"):
            Reach(**given)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"cap=.* above 0"):
            causal_attention(torch.ones(2, 1, 3), 1, 1, 1, **NONE, cap=cap)


def test_chunks_as_documents() -> None:
    """Neighbours get one number exactly where both the document and the chunk go on."""
    documents = torch.tensor([[5, 5, 5, 6, 6, 6, 6], [0, 1, 1, 1, 1, 1, 9]])
    joined = with_chunks(documents, 3, documents.t())
    assert joined is not None
    ends = [[place for place, (one, other) in enumerate(pairwise(row)) if one != other] for row in joined.tolist()]
    assert ends == [[2, 5], [0, 2, 5]]
