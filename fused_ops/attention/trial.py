"""What a machine has for attention, found by trying: whether a body that the rule has nothing against really computes here.

A body that cannot be compiled, or that a card's driver refuses, is found before training starts, and the rule's reason is then the
error's first line. Tried are forward and backward at the run's own shapes, so that what FlexAttention compiles for it serves training too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.flex import flex_attention
from fused_ops.attention.rule import ASKED, Body, Case, Offer, capability, choose, obstacle
from fused_ops.attention.sdpa import efficient_attention, flash_attention
from fused_ops.native.library import SUFFIXES, choice, torch_library

NO_TRITON = "triton, with which torch.compile makes code for CUDA, is not installed"


@dataclass(frozen=True)
class Wanted:
    """Attention as a run's training has it on one rank: micro-batch, this rank's key-value heads, query heads of each, and the options."""

    dtype: torch.dtype
    length: int
    samples: int
    groups: int
    repeats: int
    head_dim: int
    alibi: bool = False
    documents: bool = False
    dropout: bool = False

    def case(self, device: torch.device) -> Case:
        """What the rule is asked about it."""
        return Case(
            device.type,
            self.dtype,
            self.head_dim,
            self.length,
            self.alibi,
            self.documents,
            self.dropout,
            kernel=has_kernel(device.type, self.dtype),
            capability=capability(device),
        )


def has_kernel(kind: str, dtype: torch.dtype) -> bool:
    """Whether this machine has a compiled C++ kernel for attention on tensors like these. It is compiled at the first question."""
    return kind == "cpu" and dtype in SUFFIXES and torch_library(choice()) is not None


def static_offer(asked: str, length: int | None) -> Offer:
    """What can be told without touching a device."""
    return Offer(asked, length, flex="" if find_spec("triton") else NO_TRITON)


@cache
def find_offer(asked: str, wanted: Wanted, device: torch.device) -> Offer:
    """What this rank offers a run that wants this. Tries, once in a process, the body that would run.

    Raises ValueError where a body was asked for that does not work here.
    """
    offer, case = static_offer(asked, wanted.length), wanted.case(device)
    if device.type == "cuda":
        left = {Body.FLASH: "flash", Body.EFFICIENT: "efficient", Body.FLEX: "flex"}
        while (body := choose(case, offer).body) in left:
            reason = failure(partial(_trial, body, wanted, device), wanted, device)
            told: dict[str, Any] = {left.pop(body): reason}
            offer = replace(offer, **told)
            if not reason:
                break
        # Evaluation, without the dropout that keeps training from it, say, is not the place to compile it for the first time.
        if Body.FLEX in left and not offer.flex:
            offer = replace(offer, flex=Offer.flex)
    choose(case, offer)
    return offer


def _trial(body: Body, wanted: Wanted, device: torch.device, mixed: Tensor) -> Tensor:
    heads, scale = (wanted.groups, wanted.repeats, wanted.head_dim), 1 / math.sqrt(wanted.head_dim)
    if body is not Body.FLEX:
        return (flash_attention if body is Body.FLASH else efficient_attention)(mixed, *heads, scale=scale)
    slopes = torch.ones(wanted.groups * wanted.repeats, device=device) if wanted.alibi else None
    documents = torch.zeros(wanted.samples, wanted.length, dtype=torch.int64, device=device) if wanted.documents else None
    return flex_attention(mixed, *heads, scale=scale, slopes=slopes, documents=documents)


def failure(body: Callable[[Tensor], Tensor], wanted: Wanted, device: torch.device) -> str:
    """Why forward and backward of the body fail on the device, in a line; empty: they work and give finite numbers."""
    width = wanted.groups * (wanted.repeats + 2) * wanted.head_dim
    try:
        with torch.enable_grad():
            mixed = torch.full((wanted.length, wanted.samples, width), 0.5, dtype=wanted.dtype, device=device, requires_grad=True)
            context = body(mixed)
            (gradient,) = torch.autograd.grad(context, mixed, torch.ones_like(context))
        finite = bool(context.isfinite().all() & gradient.isfinite().all())  # and waits: a kernel that fails says so now
    except Exception as error:  # whatever a compiler, a driver or a card can lack
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:2])[:200]})"
    return "" if finite else "it gives numbers that are not finite on this machine"


def problem(asked: str, wanted: Wanted, device: torch.device) -> str | None:
    """Why the body that was asked for cannot run, as far as can be told without trying; None: nothing speaks against it."""
    body = ASKED.get(asked)
    return None if body is None else obstacle(body, wanted.case(device), static_offer(asked, wanted.length), asked=True)
