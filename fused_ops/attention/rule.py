"""Which body computes attention: a table of what each body cannot, and an order.

A body is a way to compute one thing; they agree up to rounding. The first in `ORDER` that nothing speaks against runs;
the banner prints it with what spoke against those before it. A body that was asked for (`--attention`) runs or is an
error, where gradients are recorded. Where none are (evaluation, a checkpoint's probe, sampling), it gives way if it
cannot: the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch


class Body(Enum):
    """Ways to compute attention; the value is what a reader of the banner is told."""

    KERNEL = "C++ kernel"
    FLASH = "torch's flash attention"
    EFFICIENT = "torch's memory-efficient attention"
    FLEX = "FlexAttention, compiled"
    SOFTMAX = "products and fused softmax"


ORDER = tuple(Body)
ASKED: Mapping[str, Body] = MappingProxyType({"flash": Body.FLASH, "flex": Body.FLEX, "softmax": Body.SOFTMAX})
"""What `--attention` takes beside auto."""

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """What is to be computed, and where.

    kind        of device: cpu or cuda
    capability  of the CUDA device, else None
    kernel      whether a compiled C++ kernel takes these tensors
    alibi, documents, dropout (on probabilities)  whether there are any
    length      of the sequences
    recorded    whether gradients are recorded
    """

    kind: str
    dtype: torch.dtype
    head_dim: int
    length: int
    alibi: bool = False
    documents: bool = False
    dropout: bool = False
    recorded: bool = True
    kernel: bool = False
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class AttentionSupport:
    """What a run asks for and what its machine turned out to have; `fused_ops.attention.trial.find_support` makes one.

    asked   auto or a key of `ASKED`
    length  of the run's training sequences; None where there is no training
    kernel, flash, efficient, flex  why the body does not work here although the table has nothing against it; empty: it
    does
    """

    asked: str = "auto"
    length: int | None = None
    kernel: str = ""
    flash: str = ""
    efficient: str = ""
    flex: str = "it was not tried in this process"


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for others."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


NOTHING_TRIED = AttentionSupport()


class Choice(NamedTuple):
    """A body and the reason for it, in words."""

    body: Body
    reason: str


_Obstacle = tuple[Callable[[Case, AttentionSupport], bool], str]

_PLAIN_CAUSAL: tuple[_Obstacle, ...] = (
    (lambda c, o: c.alibi, "it has no place for ALiBi's slopes"),
    (lambda c, o: c.documents, "it knows no documents"),
    (lambda c, o: c.dropout, "its dropout is not the one whose mask is the same on every layout"),
)
"""What torch's ready-made attentions leave out."""


def _before_ampere(case: Case) -> bool:
    return case.capability is not None and case.capability < (8, 0)


OBSTACLES: Mapping[Body, tuple[_Obstacle, ...]] = MappingProxyType(
    {
        Body.KERNEL: (
            (lambda c, o: bool(o.kernel), "{support.kernel}"),
            (lambda c, o: not c.kernel, "there is none for this device and dtype"),
            (lambda c, o: c.dropout, "it draws no dropout"),
        ),
        Body.FLASH: (
            *_PLAIN_CAUSAL,
            (lambda c, o: c.kind not in ("cpu", "cuda"), "it is made for CPUs and CUDA"),
            (lambda c, o: c.kind == "cuda" and c.dtype not in HALVES, "on CUDA it takes bf16 and fp16 only"),
            (lambda c, o: c.kind == "cuda" and c.head_dim > 256, "on CUDA it takes heads of up to 256"),
            (lambda c, o: c.kind == "cuda" and _before_ampere(c), "it needs a card of compute capability 8.0"),
            (lambda c, o: bool(o.flash), "{support.flash}"),
        ),
        Body.EFFICIENT: (
            *_PLAIN_CAUSAL,
            (lambda c, o: c.kind != "cuda", "it is made for CUDA"),
            (lambda c, o: c.dtype == torch.float64, "it takes no fp64"),
            (
                lambda c, o: c.dtype == torch.bfloat16 and _before_ampere(c),
                "bf16 needs a card of compute capability 8.0",
            ),
            (lambda c, o: c.head_dim % 8 != 0, "it takes heads of a multiple of 8"),
            (lambda c, o: bool(o.efficient), "{support.efficient}"),
        ),
        Body.FLEX: (
            (lambda c, o: c.dropout, "it draws no dropout"),
            (lambda c, o: c.kind != "cuda", "it has a backward on CUDA only"),
            (lambda c, o: c.dtype == torch.float64, "it takes no fp64"),
            (lambda c, o: not 16 <= c.head_dim <= 256, "it takes heads of 16 to 256"),
            # It is compiled for each shape: once for the run's own, and not again for each context that is sampled
            # from.
            (
                lambda c, o: not c.recorded and c.length != o.length,
                "without gradients it runs at the run's own sequence length only",
            ),
            (lambda c, o: bool(o.flex), "{support.flex}"),
        ),
        Body.SOFTMAX: (),
    }
)
"""Body -> what speaks against it: when, and in words. The fused softmax computes everything."""

PASSED_OVER: Mapping[Body, tuple[_Obstacle, ...]] = MappingProxyType(
    {
        Body.FLEX: (
            # torch 2.11 to 2.13: blocks of 16 x 16 in the backward, and no tensor cores unless TF32 is allowed.
            (lambda c, o: c.dtype == torch.float32, "its fp32 backward works on blocks of 16"),
            (lambda c, o: c.length < 128, "the sequence is shorter than one of its blocks, 128"),
        ),
    }
)
"""What a body could compute but auto does not let it."""


def obstacle(body: Body, case: Case, support: AttentionSupport, *, asked: bool = False) -> str | None:
    """What speaks against a body; None: nothing does. asked: it is forced, and only what it cannot do counts."""
    against = OBSTACLES[body] + (() if asked else PASSED_OVER.get(body, ()))
    return next((words.format(support=support) for applies, words in against if applies(case, support)), None)


@lru_cache(maxsize=256)
def choose(case: Case, support: AttentionSupport) -> Choice:
    """The body for this case. Raises ValueError where gradients are recorded and the body that was asked for cannot
    compute it.
    """
    wanted = ASKED.get(support.asked)
    if wanted is not None:
        against = obstacle(wanted, case, support, asked=True)
        if against is None:
            return Choice(wanted, f"as --attention {support.asked} asks")
        if case.recorded:
            raise ValueError(f"--attention {support.asked} cannot run: {against}")
    refused: list[str] = []
    for body in ORDER:
        against = obstacle(body, case, support)
        if against is None:
            return Choice(body, "; ".join(refused) or "the first choice")
        refused.append(f"no {body.value}: {against}")
    raise AssertionError("nothing speaks against the last body")
