"""Trials of attention's bodies on this machine, before training starts.

A body may have no obstacle in the rule's table and still fail: it cannot be compiled, the driver refuses it, or its
numbers differ from float64's. The trial finds this, and the reason is the error's first line or the size of the
difference. It runs forward and backward at the run's own shapes, so that training reuses what FlexAttention compiles,
and forward again without a gradient, as evaluation and recomputation do: that is another compiled program.
The C++ kernel has a trial of its own, of one size for all runs (kernel.py).
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
from torch.nn.attention import SDPBackend

from fused_ops.attention.cudnn import CudnnCase, cudnn_refusal, versions
from fused_ops.attention.flex import flex_attention
from fused_ops.attention.kernel import refusal
from fused_ops.attention.package import MISSING, is_installed, package_attention
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.sdpa import CUDNN, efficient_attention, flash_attention, flash_backends
from fused_ops.attention.selection import (
    ASKED,
    AttentionCase,
    AttentionChoice,
    AttentionSupport,
    Body,
    capability,
    choose,
    obstacle,
)
from fused_ops.known import disagreement, known_numbers
from fused_ops.native.library import SUFFIXES, choice, torch_library
from fused_ops.softmax import alibi_slopes

NO_TRITON = "triton, with which torch.compile makes code for GPUs, is not installed"
ALLOWED = MappingProxyType({torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-2, torch.float64: 1e-9})
"""Largest relative error against float64, in the norm: a few times that of rounding (fp32: of TF32), and far less than
that of a wrong mask, slope or order of heads.
"""
_SCORES = 1 << 22
"""Most scores that the comparison computes in float64."""


@dataclass(frozen=True)
class AttentionWorkload:
    """The attention of a run's training on one rank, in one kind of layers.

    dtype      of the tensors
    length     s
    samples    b
    groups     key-value heads of this rank
    repeats    query heads of each
    head_dim   d
    alibi      whether there are slopes
    documents  whether there are document boundaries
    dropout    whether there is dropout of probabilities
    reach      of the queries
    cap        bound of the scores, or None
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
    reach: Reach = EVERYTHING
    cap: float | None = None

    @property
    def words(self) -> str:
        """What this kind of layers has that others may not have, as in "attention with ..."; empty for nothing."""
        return " and ".join(filter(None, (self.reach.words, "" if self.cap is None else f"scores up to {self.cap:g}")))

    def case(self, device: torch.device) -> AttentionCase:
        """The rule's case for it on this device."""
        reach = self.reach.over(self.length)
        return AttentionCase(
            device.type,
            self.dtype,
            self.head_dim,
            self.length,
            self.alibi,
            self.documents,
            self.dropout,
            reach.window,
            reach.chunk,
            self.cap,
            kernel=kernel_refusal(device.type, self.dtype) == "",
            capability=capability(device),
        )


def kernel_refusal(kind: str, dtype: torch.dtype) -> str | None:
    """Why this machine's C++ kernel for attention is not used for this dtype; empty if it is; None if there is none.

    The first call compiles and tries it.
    """
    library = torch_library(choice()) if kind == "cpu" and dtype in SUFFIXES else None
    return None if library is None else refusal(library, dtype)


def static_support(asked: str, length: int | None) -> AttentionSupport:
    """The support as far as it is known without using a device. A torch for processors comes without triton, which says
    nothing of the machine that has the card: every torch for CUDA or ROCm brings it.
    """
    package = "" if is_installed() else MISSING
    is_for_cards = torch.version.cuda is not None or torch.version.hip is not None
    flex = NO_TRITON if is_for_cards and find_spec("triton") is None else ""
    return AttentionSupport(asked, length, package=package, flex=flex)


@cache
def find_support(asked: str, workload: AttentionWorkload, device: torch.device) -> AttentionSupport:
    """The support of this rank for a workload. On a GPU it tries the body that would run, once in a process.

    asked: --attention. Raises ValueError where the body that it names does not work here.
    """
    support, case = static_support(asked, workload.length), workload.case(device)
    support = replace(support, kernel=kernel_refusal(device.type, workload.dtype) or "")
    if device.type == "cuda":
        if choose(case, support).body is Body.FLASH:
            support = replace(support, cudnn=_cudnn_failure(workload, device))
        backends = flash_backends(device, workload.groups, workload.length, cudnn=not support.cudnn)
        left = {Body.FLASH: "flash", Body.EFFICIENT: "efficient", Body.PACKAGE: "package", Body.FLEX: "flex"}
        while (body := choose(case, support).body) in left:
            reason = failure(partial(_trial, body, workload, device, backends), workload, device)
            told: dict[str, Any] = {left.pop(body): reason}
            support = replace(support, **told)
            if not reason:
                break
        # Evaluation (which has no dropout) must not be the first to compute by what was not tried, or to compile it.
        if Body.PACKAGE in left and not support.package:
            support = replace(support, package=AttentionSupport.package)
        if Body.FLEX in left and not support.flex:
            support = replace(support, flex=AttentionSupport.flex)
    choose(case, support)
    return support


def find_supports(asked: str, workloads: tuple[AttentionWorkload, ...], device: torch.device) -> AttentionSupport:
    """The support of this rank for a model with a workload for each kind of its layers: `find_support` for each.

    Raises ValueError where the body of --attention does not work for one of them.
    """
    supports = [find_support(asked, workload, device) for workload in workloads]
    if len(supports) == 1:
        return supports[0]
    kinds = (workload.case(device).layers for workload in workloads)
    return replace(supports[0], kinds=tuple(zip(kinds, supports, strict=True)))


def choices(
    workloads: tuple[AttentionWorkload, ...], device: torch.device, support: AttentionSupport
) -> dict[str, AttentionChoice]:
    """The body of each kind of layers, by the kind's words. Of kinds with the same body and reason only the first."""
    found: dict[str, AttentionChoice] = {}
    for workload in workloads:
        choice = choose(workload.case(device), support)
        if choice not in found.values():
            found[workload.words] = choice
    return found if len(found) > 1 else {"": next(iter(found.values()))}


def _cudnn_failure(workload: AttentionWorkload, device: torch.device) -> str:
    """Why cuDNN's attention does not compute this on the card: a known fault, or numbers that are not float64's."""
    card = capability(device)
    if card is None:
        return AttentionSupport.cudnn
    fault = cudnn_refusal(CudnnCase(card, *versions(), workload.groups, workload.length))
    return fault or failure(partial(_trial, Body.FLASH, workload, device, CUDNN), workload, device)


def _trial(
    body: Body, workload: AttentionWorkload, device: torch.device, backends: tuple[SDPBackend, ...], mixed: Tensor
) -> Tensor:
    heads, scale = (workload.groups, workload.repeats, workload.head_dim), 1 / math.sqrt(workload.head_dim)
    bounds: dict[str, Any] = {"reach": workload.reach.over(workload.length), "cap": workload.cap}
    if body is Body.FLASH:
        return flash_attention(mixed, *heads, scale=scale, backends=backends)
    if body is Body.EFFICIENT:
        return efficient_attention(mixed, *heads, scale=scale)
    slopes, documents = _slopes(workload, device), _documents(workload, device)
    if body is Body.PACKAGE:
        return package_attention(mixed, *heads, scale=scale, slopes=slopes, **bounds)
    return flex_attention(mixed, *heads, scale=scale, slopes=slopes, documents=documents, **bounds)


def _slopes(workload: AttentionWorkload, device: torch.device) -> Tensor | None:
    return torch.tensor(alibi_slopes(workload.groups * workload.repeats), device=device) if workload.alibi else None


def _documents(workload: AttentionWorkload, device: torch.device) -> Tensor | None:
    """int64 [b, s]: two documents in each sample, whose boundaries differ between samples; None without documents."""
    ends = torch.arange(1, workload.samples + 1, device=device) * workload.length // (workload.samples + 1)
    return (torch.arange(workload.length, device=device) >= ends[:, None]).long() if workload.documents else None


def failure(body: Callable[[Tensor], Tensor], workload: AttentionWorkload, device: torch.device) -> str:
    """Why forward (with a gradient or without) or backward of the body fails on the device, in a line; empty if they
    agree with float64.

    It compares some rows of the last sample's context, from the first to the last position, and their gradients.
    """
    width = workload.groups * (workload.repeats + 2) * workload.head_dim
    count = max(2, min(64, _SCORES // (workload.length * workload.groups * workload.repeats)))
    rows = torch.linspace(0, workload.length - 1, count, device=device).round().long().unique()
    try:
        with torch.enable_grad():
            mixed = known_numbers(
                workload.length, workload.samples, width, seed=1, dtype=workload.dtype, device=device
            ).requires_grad_()
            context = body(mixed)
            cotangent = known_numbers(*context.shape, seed=2, dtype=workload.dtype, device=device)
            cotangent[:, -1].index_fill_(0, _others(rows, workload.length), 0.0)
            (gradient,) = torch.autograd.grad(context, mixed, cotangent)
            last = mixed[:, -1].detach().double().requires_grad_()
            exact = _exact(last, rows, workload)
            (exact_gradient,) = torch.autograd.grad(exact, last, cotangent[rows, -1].double())
        with torch.no_grad():
            alone = body(mixed.detach())
        allowed = ALLOWED[workload.dtype]  # the comparison waits for the device, so errors of kernels are raised here
        pairs = ((context[rows, -1], exact), (gradient[:, -1], exact_gradient), (alone[rows, -1], exact))
        off = next(filter(None, (disagreement(found, right, allowed) for found, right in pairs)), "")
    except Exception as error:  # a compiler, a driver or a GPU may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:2])[:200]})"
    return f"{off} on this machine" if off else ""


def _others(rows: Tensor, length: int) -> Tensor:
    chosen = torch.zeros(length, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
    return (~chosen).nonzero().flatten()


def _exact(mixed: Tensor, rows: Tensor, workload: AttentionWorkload) -> Tensor:
    """Rows of the last sample's context from its projection [s, g(r + 2)d], in float64: [rows, g r d]."""
    parts = mixed.unflatten(1, (workload.groups, workload.repeats + 2, workload.head_dim)).split(
        [workload.repeats, 1, 1], dim=2
    )
    query, key, value = parts[0][rows], parts[1].squeeze(2), parts[2].squeeze(2)
    scores = torch.einsum("igrd,jgd->grij", query, key) / math.sqrt(workload.head_dim)
    if workload.cap is not None:
        scores = workload.cap * torch.tanh(scores / workload.cap)
    position = torch.arange(workload.length, device=mixed.device)
    if (slopes := _slopes(workload, mixed.device)) is not None:
        scores = scores + slopes.double().view(workload.groups, workload.repeats, 1, 1) * position
    hidden = position > rows[:, None]
    if (window := workload.reach.window) is not None:
        hidden = hidden | (rows[:, None] - position >= window)
    if (chunk := workload.reach.chunk) is not None:
        hidden = hidden | (rows[:, None] // chunk != position // chunk)
    if (documents := _documents(workload, mixed.device)) is not None:
        hidden = hidden | (documents[-1] != documents[-1][rows, None])
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("grij,jgd->igrd", weights, value).flatten(1)


def problem(asked: str, workload: AttentionWorkload, device: torch.device) -> str | None:
    """Why the body of --attention cannot run, as far as it is known without trying; None if there is no obstacle."""
    body = ASKED.get(asked)
    return (
        None
        if body is None
        else obstacle(body, workload.case(device), static_support(asked, workload.length), asked=True)
    )
