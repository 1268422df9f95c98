"""The trial of a body of attention: it passes what gives float64's numbers, and nothing that only
runs and is finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.attention import trial as attention_trial
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import efficient_attention, flash_attention
from fused_ops.attention.selection import Body
from fused_ops.attention.trial import AttentionWorkload, failure
from tests.fused_ops.test_attention_bodies import BF16, FP16, FP32, FP64, in_eager, with_gradients

__all__ = ["with_gradients"]


def test_a_trial_tells_in_a_line_what_failed() -> None:
    workload, cpu = AttentionWorkload(FP32, 16, 1, 2, 1, 8), torch.device("cpu")

    def broken(mixed: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nfor this device")

    assert failure(broken, workload, cpu) == "it fails on this machine (RuntimeError: no kernel image for this device)"
    assert "off by inf" in failure(lambda mixed: plain(mixed, workload) / 0.0, workload, cpu)


def plain(
    mixed: Tensor,
    workload: AttentionWorkload,
    *,
    slopes: bool = True,
    documents: bool = True,
    factor: float = 1.0,
    wider: int = 0,
    capped: float = 1.0,
) -> Tensor:
    """A body that computes what the trial wants, or leaves something of it out."""
    given: dict[str, Any] = {
        "slopes": attention_trial._slopes(workload, mixed.device) if slopes else None,
        "documents": attention_trial._documents(workload, mixed.device) if documents else None,
    }
    window, chunk = (width and width + wider for width in (workload.reach.window, workload.reach.chunk))
    given["reach"], given["cap"] = Reach(window, chunk), workload.cap and workload.cap * capped
    scale = factor / math.sqrt(workload.head_dim)
    return reference_attention(mixed, workload.groups, workload.repeats, workload.head_dim, scale=scale, **given)


TRIED = [
    AttentionWorkload(FP32, 200, 2, 2, 3, 8, alibi=True, documents=True),
    AttentionWorkload(BF16, 130, 3, 1, 4, 16, alibi=True, documents=True),
]
BOUNDED = [
    AttentionWorkload(FP32, 200, 2, 2, 3, 8, documents=True, reach=Reach(7), cap=1.5),
    AttentionWorkload(BF16, 130, 1, 1, 4, 16, alibi=True, reach=Reach(chunk=9), cap=1.0),
]
"""Small widths, so that a key more or less is no rounding error."""
WRONG: dict[str, Callable[[Tensor, AttentionWorkload], Tensor]] = {
    "zeros": lambda mixed, workload: plain(mixed, workload) * 0.0,
    "no slopes": lambda mixed, workload: plain(mixed, workload, slopes=False),
    "no documents": lambda mixed, workload: plain(mixed, workload, documents=False),
    "another scale": lambda mixed, workload: plain(mixed, workload, factor=1.3),
    "samples in another order": lambda mixed, workload: plain(mixed.roll(1, 1), workload),
    "heads in another order": lambda mixed, workload: (
        plain(mixed, workload).unflatten(2, (-1, workload.head_dim)).roll(1, 2).flatten(2)
    ),
    "nothing from the last key": lambda mixed, workload: plain(torch.cat([mixed[:-1], mixed[-2:-1]]), workload),
    "a gradient too many": lambda mixed, workload: TooMany.apply(plain(mixed, workload), mixed),
    "other numbers where no gradient is recorded": lambda mixed, workload: plain(
        mixed, workload, documents=torch.is_grad_enabled(), slopes=torch.is_grad_enabled()
    ),
}


class TooMany(torch.autograd.Function):
    """Right forward; the projection gets a little of what it should not."""

    @staticmethod
    def forward(ctx: Any, context: Tensor, mixed: Tensor) -> Tensor:
        ctx.save_for_backward(mixed)
        return context.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], 0.1 * ctx.saved_tensors[0]


@pytest.mark.parametrize("workload", TRIED, ids=lambda workload: str(workload.dtype))
@pytest.mark.parametrize("fault", WRONG)
def test_a_body_that_computes_something_else_fails_its_trial(fault: str, workload: AttentionWorkload) -> None:
    """All of these give finite numbers."""
    cpu = torch.device("cpu")
    assert failure(lambda mixed: plain(mixed, workload), workload, cpu) == ""
    assert re.fullmatch(
        "its numbers are off by .* on this machine", failure(lambda mixed: WRONG[fault](mixed, workload), workload, cpu)
    )


@pytest.mark.parametrize("workload", BOUNDED, ids=lambda workload: str(workload.dtype))
def test_another_width_or_cap_fails_its_trial(workload: AttentionWorkload) -> None:
    cpu = torch.device("cpu")
    assert failure(lambda mixed: plain(mixed, workload), workload, cpu) == ""
    for wrong in (partial(plain, wider=1), partial(plain, wider=-1), partial(plain, capped=1.5)):
        assert "its numbers are off by" in failure(lambda mixed, wrong=wrong: wrong(mixed, workload), workload, cpu)  # type: ignore[misc]
    without = replace(workload, reach=EVERYTHING, cap=None)
    assert "its numbers are off by" in failure(lambda mixed: plain(mixed, without), workload, cpu)


@pytest.mark.parametrize("body", [flash_attention, efficient_attention])
def test_torchs_own_bodies_pass_their_trial(body: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_ops.attention.sdpa.EFFICIENT", ())  # on a CPU torch chooses
    for dtype in (FP64, FP32, BF16, FP16):
        workload = AttentionWorkload(dtype, 150, 2, 2, 2, 16)
        assert failure(lambda mixed: body(mixed, 2, 2, 16, scale=0.25), workload, torch.device("cpu")) == ""


@pytest.mark.slow
def test_flex_passes_its_trial_with_slopes_and_documents(with_gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_trial, "flex_attention", in_eager)
    cpu = torch.device("cpu")
    for workload in (replace(tried, dtype=FP64) for tried in (TRIED[0], *BOUNDED)):
        # torch's own op compiles itself, and takes a second shape for a dynamic one, which it cannot compile in fp64
        torch._dynamo.reset()
        tried = partial(attention_trial._trial, Body.FLEX, workload, cpu, ())
        assert failure(tried, workload, cpu) == ""
