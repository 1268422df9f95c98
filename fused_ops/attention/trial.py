"""What a machine has for attention, found by trying: whether a body that the rule has nothing against really computes
it here.

A body that cannot be compiled, that a card's driver refuses, or that gives other numbers than float64, is found before
training starts, and the rule's reason is then the error's first line, or how far off it is. Tried are forward and
backward at the run's own shapes, so that what FlexAttention compiles for it serves training too. The C++ kernel has a
trial of its own, of one size for all runs (kernel.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.flex import flex_attention
from fused_ops.attention.kernel import refusal
from fused_ops.attention.rule import ASKED, AttentionSupport, Body, Case, capability, choose, obstacle
from fused_ops.attention.sdpa import efficient_attention, flash_attention
from fused_ops.known import disagreement, known
from fused_ops.native.library import SUFFIXES, choice, torch_library
from fused_ops.softmax import alibi_slopes

NO_TRITON = "triton, with which torch.compile makes code for CUDA, is not installed"
ALLOWED = MappingProxyType({torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-2, torch.float64: 1e-9})
"""How far a body's numbers may be off float64, in the norm: some times its own rounding (fp32: TF32's), far less than
another mask, slope or order of heads makes.
"""
_SCORES = 1 << 22
"""Scores that the comparison computes in float64, at most."""


@dataclass(frozen=True)
class AttentionWorkload:
    """Attention as a run's training has it on one rank: micro-batch, this rank's key-value heads, query heads of each,
    and the options.
    """

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
            kernel=kernel_refusal(device.type, self.dtype) == "",
            capability=capability(device),
        )


def kernel_refusal(kind: str, dtype: torch.dtype) -> str | None:
    """Why this machine's compiled C++ kernel for attention is not used on tensors like these; empty: it is; None: there
    is none.

    It is compiled, and tried, at the first question.
    """
    library = torch_library(choice()) if kind == "cpu" and dtype in SUFFIXES else None
    return None if library is None else refusal(library, dtype)


def static_support(asked: str, length: int | None) -> AttentionSupport:
    """What can be told without touching a device."""
    return AttentionSupport(asked, length, flex="" if find_spec("triton") else NO_TRITON)


@cache
def find_support(asked: str, workload: AttentionWorkload, device: torch.device) -> AttentionSupport:
    """What this rank offers a run that wants this. Tries, once in a process, the body that would run.

    Raises ValueError where a body was asked for that does not work here.
    """
    support, case = static_support(asked, workload.length), workload.case(device)
    support = replace(support, kernel=kernel_refusal(device.type, workload.dtype) or "")
    if device.type == "cuda":
        left = {Body.FLASH: "flash", Body.EFFICIENT: "efficient", Body.FLEX: "flex"}
        while (body := choose(case, support).body) in left:
            reason = failure(partial(_trial, body, workload, device), workload, device)
            told: dict[str, Any] = {left.pop(body): reason}
            support = replace(support, **told)
            if not reason:
                break
        # Evaluation, without the dropout that keeps training from it, say, is not the place to compile it for the first
        # time.
        if Body.FLEX in left and not support.flex:
            support = replace(support, flex=AttentionSupport.flex)
    choose(case, support)
    return support


def _trial(body: Body, workload: AttentionWorkload, device: torch.device, mixed: Tensor) -> Tensor:
    heads, scale = (workload.groups, workload.repeats, workload.head_dim), 1 / math.sqrt(workload.head_dim)
    if body is not Body.FLEX:
        return (flash_attention if body is Body.FLASH else efficient_attention)(mixed, *heads, scale=scale)
    return flex_attention(
        mixed, *heads, scale=scale, slopes=_slopes(workload, device), documents=_documents(workload, device)
    )


def _slopes(workload: AttentionWorkload, device: torch.device) -> Tensor | None:
    return torch.tensor(alibi_slopes(workload.groups * workload.repeats), device=device) if workload.alibi else None


def _documents(workload: AttentionWorkload, device: torch.device) -> Tensor | None:
    """Two in each sample, which end at different places."""
    ends = torch.arange(1, workload.samples + 1, device=device) * workload.length // (workload.samples + 1)
    return (torch.arange(workload.length, device=device) >= ends[:, None]).long() if workload.documents else None


def failure(body: Callable[[Tensor], Tensor], workload: AttentionWorkload, device: torch.device) -> str:
    """Why forward and backward of the body fail on the device, in a line; empty: they give the numbers that float64
    does.

    Compared are some rows of the last sample's context, from its first position to its last, and all gradients of these
    rows.
    """
    width = workload.groups * (workload.repeats + 2) * workload.head_dim
    count = max(2, min(64, _SCORES // (workload.length * workload.groups * workload.repeats)))
    rows = torch.linspace(0, workload.length - 1, count, device=device).round().long().unique()
    try:
        with torch.enable_grad():
            mixed = known(
                workload.length, workload.samples, width, seed=1, dtype=workload.dtype, device=device
            ).requires_grad_()
            context = body(mixed)
            cotangent = known(*context.shape, seed=2, dtype=workload.dtype, device=device)
            cotangent[:, -1].index_fill_(0, _others(rows, workload.length), 0.0)
            (gradient,) = torch.autograd.grad(context, mixed, cotangent)
            last = mixed[:, -1].detach().double().requires_grad_()
            exact = _exact(last, rows, workload)
            (exact_gradient,) = torch.autograd.grad(exact, last, cotangent[rows, -1].double())
        allowed = ALLOWED[workload.dtype]  # comparing waits: a kernel that fails says so now
        off = disagreement(context[rows, -1], exact, allowed) or disagreement(gradient[:, -1], exact_gradient, allowed)
    except Exception as error:  # whatever a compiler, a driver or a card can lack
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:2])[:200]})"
    return f"{off} on this machine" if off else ""


def _others(rows: Tensor, length: int) -> Tensor:
    chosen = torch.zeros(length, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    return (~chosen).nonzero().flatten()


def _exact(mixed: Tensor, rows: Tensor, workload: AttentionWorkload) -> Tensor:
    """Some rows of the last sample's context, of its projection [s, g(r + 2)d] in float64: [rows, g r d]."""
    parts = mixed.unflatten(1, (workload.groups, workload.repeats + 2, workload.head_dim)).split(
        [workload.repeats, 1, 1], dim=2
    )
    query, key, value = parts[0][rows], parts[1].squeeze(2), parts[2].squeeze(2)
    scores = torch.einsum("igrd,jgd->grij", query, key) / math.sqrt(workload.head_dim)
    position = torch.arange(workload.length, device=mixed.device)
    if (slopes := _slopes(workload, mixed.device)) is not None:
        scores = scores + slopes.double().view(workload.groups, workload.repeats, 1, 1) * position
    hidden = position > rows[:, None]
    if (documents := _documents(workload, mixed.device)) is not None:
        hidden = hidden | (documents[-1] != documents[-1][rows, None])
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("grij,jgd->igrd", weights, value).flatten(1)


def problem(asked: str, workload: AttentionWorkload, device: torch.device) -> str | None:
    """Why the body that was asked for cannot run, as far as can be told without trying; None: nothing speaks against
    it.
    """
    body = ASKED.get(asked)
    return (
        None
        if body is None
        else obstacle(body, workload.case(device), static_support(asked, workload.length), asked=True)
    )
