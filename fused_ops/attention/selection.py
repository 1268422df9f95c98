"""The choice of the body that computes attention: an order, and a table of what each body cannot compute.

Bodies agree up to rounding. The first one in `ORDER` without an obstacle runs. The banner prints it with the obstacles
of those before it. Where autograd records, a body that --attention names runs or is an error. Elsewhere (evaluation, a
checkpoint's probe, generation) another body replaces it if it cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from fused_ops.blocks import HALVES
from fused_ops.products import lacks


class Body(Enum):
    """The bodies of attention. The value is the name in the banner."""

    KERNEL = "C++ kernel"
    FLASH = "torch's flash attention"
    EFFICIENT = "torch's memory-efficient attention"
    PACKAGE = "the package flash_attn"
    FLEX = "FlexAttention, compiled"
    SOFTMAX = "products and fused softmax"


ORDER = tuple(Body)
ASKED: Mapping[str, Body] = MappingProxyType(
    {"flash": Body.FLASH, "flash-attn": Body.PACKAGE, "flex": Body.FLEX, "softmax": Body.SOFTMAX}
)
"""Values of --attention other than auto -> their bodies."""


class LayerKind(NamedTuple):
    """In what the layers of one model may differ: `AttentionCase` says what it means."""

    window: int | None = None
    chunk: int | None = None
    cap: float | None = None


PLAIN = LayerKind()
"""Layers without any of these: the only ones that flash attention, and so cuDNN's, computes."""


@dataclass(frozen=True)
class AttentionCase:
    """What is to be computed, and where.

    kind        of device: cpu or cuda
    dtype       of the tensors
    head_dim    width of a head
    length      of the sequences
    alibi       whether there are slopes
    documents   whether there are document boundaries
    dropout     whether there is dropout of probabilities
    recorded    whether autograd records
    window      how many keys a query sees, its own included; None: no window
    chunk       how many positions there are in a chunk, beyond which no query sees; None: no chunks
    cap         bound of the scores, or None
    kernel      whether a compiled C++ kernel takes these tensors
    capability  compute capability of the CUDA device; else None
    """

    kind: str
    dtype: torch.dtype
    head_dim: int
    length: int
    alibi: bool = False
    documents: bool = False
    dropout: bool = False
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    recorded: bool = True
    kernel: bool = False
    capability: tuple[int, int] | None = None

    @property
    def layers(self) -> LayerKind:
        """The kind of layers that it is a case of."""
        return LayerKind(self.window, self.chunk, self.cap)


@dataclass(frozen=True)
class AttentionSupport:
    """What a run asks for and what works on its machine; `fused_ops.attention.trial.find_support` makes one.

    asked      auto or a key of `ASKED`
    length     of the run's training sequences; None without training
    kernel     why this body does not work on this machine, which the table does not know; empty if it does
    flash      the same
    efficient  the same
    package    the same
    flex       the same
    cudnn      why cuDNN's attention does not compute what flash does; empty if it does
    kinds      for a model with several kinds of layers: each kind, and its own support
    measured   on the meta device, the body whose bytes are measured
    """

    asked: str = "auto"
    length: int | None = None
    kernel: str = ""
    flash: str = ""
    efficient: str = ""
    package: str = "it was not tried in this process"
    flex: str = "it was not tried in this process"
    cudnn: str = "it was not tried in this process"
    kinds: tuple[tuple[LayerKind, AttentionSupport], ...] = ()

    def of(self, kind: LayerKind) -> AttentionSupport:
        """The support of a kind of layers. One that was not tried has that of the others."""
        return next((support for each, support in self.kinds if each == kind), self)

    measured: Body | None = None


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


NOTHING_TRIED = AttentionSupport()


class AttentionChoice(NamedTuple):
    """A body and the reason for it, in words."""

    body: Body
    reason: str


_Obstacle = tuple[Callable[[AttentionCase, AttentionSupport], bool], str]

_PLAIN_CAUSAL: tuple[_Obstacle, ...] = (
    (lambda c, o: c.alibi, "it has no place for ALiBi's slopes"),
    (lambda c, o: c.documents, "it knows no documents"),
    (lambda c, o: c.dropout, "its dropout is not the one whose mask is the same on every layout"),
    (lambda c, o: c.chunk is not None, "it knows no chunks"),
    (lambda c, o: c.window is not None, "it knows no windows"),
    (lambda c, o: c.cap is not None, "it has no place for a cap of the scores"),
)
"""What torch's attention kernels cannot compute."""
_OF_THE_PACKAGE = _PLAIN_CAUSAL[1:4]
"""What of that the package flash_attn cannot compute either."""


def _before_ampere(case: AttentionCase) -> bool:
    return case.capability is not None and case.capability < (8, 0)


_FLASH_ON_CUDA: tuple[_Obstacle, ...] = (
    (lambda c, o: c.kind == "cuda" and c.dtype not in HALVES, "on CUDA it takes bf16 and fp16 only"),
    (lambda c, o: c.kind == "cuda" and c.head_dim > 256, "on CUDA it takes heads of up to 256"),
    (lambda c, o: c.kind == "cuda" and _before_ampere(c), "it needs a card of compute capability 8.0"),
)
"""What the kernels of flash attention, torch's and the package's, cannot compute on a card."""

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
            *_FLASH_ON_CUDA,
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
        Body.PACKAGE: (
            *_OF_THE_PACKAGE,
            (lambda c, o: c.kind != "cuda", "it is made for CUDA"),
            *_FLASH_ON_CUDA,
            (lambda c, o: bool(o.package), "{support.package}"),
        ),
        Body.FLEX: (
            (lambda c, o: c.dropout, "it draws no dropout"),
            (lambda c, o: c.kind != "cuda", "it has a backward on CUDA only"),
            (lambda c, o: c.dtype == torch.float64, "it takes no fp64"),
            (lambda c, o: not 16 <= c.head_dim <= 256, "it takes heads of 16 to 256"),
            # It is compiled for each shape: for the run's own length only, not for each length of generation.
            (
                lambda c, o: not c.recorded and c.length != o.length,
                "without gradients it runs at the run's own sequence length only",
            ),
            (lambda c, o: bool(o.flex), "{support.flex}"),
        ),
        Body.SOFTMAX: (),
    }
)
"""Body -> its obstacles: a condition and words. The fused softmax can compute everything."""

PASSED_OVER: Mapping[Body, tuple[_Obstacle, ...]] = MappingProxyType(
    {
        Body.FLASH: (
            (lambda c, o: c.kind == "cpu" and lacks(c.dtype), "its products of 16 bits are slow on this processor"),
        ),
        Body.FLEX: (
            # torch 2.11 to 2.13: blocks of 16 x 16 in the backward, and no tensor cores unless TF32 is allowed.
            (lambda c, o: c.dtype == torch.float32, "its fp32 backward works on blocks of 16"),
            (lambda c, o: c.length < 128, "the sequence is shorter than one of its blocks, 128"),
        ),
    }
)
"""Body -> cases that it can compute, but for which auto does not choose it."""


def obstacle(body: Body, case: AttentionCase, support: AttentionSupport, *, asked: bool = False) -> str | None:
    """The first obstacle of a body; None if there is none. asked: only count what it cannot compute."""
    against = OBSTACLES[body] + (() if asked else PASSED_OVER.get(body, ()))
    return next((words.format(support=support) for applies, words in against if applies(case, support)), None)


@lru_cache(maxsize=256)
def choose(case: AttentionCase, support: AttentionSupport) -> AttentionChoice:
    """The body for this case. Raises ValueError where autograd records and --attention's body cannot compute it."""
    support = support.of(case.layers)
    wanted = ASKED.get(support.asked)
    if wanted is not None:
        against = obstacle(wanted, case, support, asked=True)
        if against is None:
            return _chosen(wanted, f"as --attention {support.asked} asks", case, support)
        if case.recorded:
            raise ValueError(f"--attention {support.asked} cannot run: {against}")
    refused: list[str] = []
    for body in ORDER:
        against = obstacle(body, case, support)
        if against is None:
            return _chosen(body, "; ".join(refused) or "the first choice", case, support)
        refused.append(f"no {body.value}: {against}")
    raise AssertionError("nothing speaks against the last body")


def _chosen(body: Body, reason: str, case: AttentionCase, support: AttentionSupport) -> AttentionChoice:
    """A choice; of flash on a card also whether cuDNN computes it."""
    if body is Body.FLASH and case.kind == "cuda":
        reason += f"; not cuDNN's: {support.cudnn}" if support.cudnn else "; cuDNN's"
    return AttentionChoice(body, reason)
