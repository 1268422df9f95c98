"""Bytes that one unit of a model takes, measured by torch's profiler, which sees every allocation of torch's allocator.

It sees those inside kernels too. It shares no code with `megazero.plan.activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from megazero.mpu.gradient import Write
from megazero.mpu.parameter import ParameterKind, spec_of


@dataclass(frozen=True)
class Bytes:
    """Bytes alive after something, beyond those before it, and the most in between."""

    left: int
    peak: int
    made: tuple[int, ...] = ()


def metered(act: Callable[[], Any]) -> tuple[Any, Bytes]:
    """What `act` returns, and the bytes that it allocated."""
    with profile(profile_memory=True) as recorded:
        made = act()
    kineto = recorded.kineto_results
    assert kineto is not None
    events = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(kineto.events()) if e.name() == "[memory]")
    alive = list(accumulate((size for *_, size in events), initial=0))
    return made, Bytes(alive[-1], max(alive), tuple(size for *_, size in events))


def is_table(parameter: Tensor) -> bool:
    """Whether it belongs to an embedding or a head, whose gradients no backward defers."""
    return spec_of(parameter).kind is ParameterKind.EMBEDDING


class Target:
    """A gradient target that adds each gradient to a buffer at once, or keeps it as a split backward does."""

    def __init__(self, parameter: Tensor, kept: list[Write] | None) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.buffer, self.kept = torch.zeros(parameter.shape, dtype=wide), None if is_table(parameter) else kept

    def add(self, write: Write) -> None:
        if self.kept is None:
            write(self.buffer, True)
        else:
            self.kept.append(write)
