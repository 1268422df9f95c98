"""Where cuDNN's attention may compute: a table of its known faults.

torch 2.11 offers it for shapes and versions at which it reads memory that is not its own, or gives wrong numbers
without an error. A trial does not find these: the numbers depend on what lies behind a tensor, or on the batch. So it
runs only where no row of the table applies, and torch's own flash attention runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CudnnCase:
    """A call of cuDNN's attention.

    capability  compute capability of the card
    cuda        version that torch was built for, (12, 9) for 12.9
    cudnn       version of the library that torch has loaded, 91501 for 9.15.1
    groups      number of key-value heads on this rank
    length      of the sequences
    """

    capability: tuple[int, int]
    cuda: tuple[int, int]
    cudnn: int
    groups: int
    length: int


OBSTACLES: tuple[tuple[Callable[[CudnnCase], bool], str], ...] = (
    (lambda c: c.capability[0] not in (9, 10), "torch's own is as fast on this card"),
    # pytorch issue 169849; torch turned it off there by default in pull request 171627.
    (lambda c: c.cuda < (12, 9), "it reads and writes memory that is not its own with CUDA before 12.9"),
    # pytorch issue 193893, open in 2026-08: cuDNN 9.19 and 9.20, and no later version was tried.
    (
        lambda c: c.capability[0] == 10 and c.groups < 8,
        "it gives wrong numbers for fewer than 8 key-value heads on compute capability 10",
    ),
    # cuDNN's release notes of 9.15.1.
    (
        lambda c: c.cudnn < 91501 and c.length % 128 != 0,
        "before cuDNN 9.15.1 its backward reads out of bounds where the sequence is no multiple of 128",
    ),
)
"""When, and why cuDNN's attention does not compute there."""


def cudnn_refusal(case: CudnnCase) -> str | None:
    """Why cuDNN's attention is not used; None: it may be."""
    return next((words for applies, words in OBSTACLES if applies(case)), None)


def versions() -> tuple[tuple[int, int], int]:
    """(CUDA that torch was built for, cuDNN that it has loaded), as `CudnnCase` has them; zeros where there is none."""
    major, minor, *_ = (*(int(part) for part in (torch.version.cuda or "").split(".") if part), 0, 0)
    return (major, minor), torch.backends.cudnn.version() or 0
