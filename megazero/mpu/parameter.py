"""A parameter knows which part of which global tensor it is.

Initialisation, gradient norm, ZeRO, checkpoints and conversion read a parameter's `ParameterSpec` and nothing else: no
name patterns, no attributes patched on from outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

Box = tuple[tuple[int, int], ...]
"""One half-open range per dimension of a global tensor."""


class ParameterKind(Enum):
    """What a parameter is; decides weight decay."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    BIAS = "bias"
    NORM = "norm"

    @property
    def decays(self) -> bool:
        return self in (ParameterKind.MATRIX, ParameterKind.EMBEDDING)


class StateGroup(Enum):
    """The ranks that hold the same parameter: its gradient is summed over them, and its state shared out to them.

    `Axes.state_ranks` and `ProcessGrid.state_group` say which ranks these are.
    """

    REPLICAS = "replicas"
    """dp x cp: what one stage holds alone."""
    TIED = "tied"
    """{first, last stage} x replicas: a tied embedding that lies on two stages."""

    @property
    def spans_stages(self) -> bool:
        """Whether its members reach a reduction at different points of their schedules."""
        return self is StateGroup.TIED


@dataclass(frozen=True)
class ParameterSpec:
    """What a rank holds of one parameter: which part of the global tensor, and how it begins.

    name         global name, the same on every layout: "blocks.3.attention.qkv.weight"
    shape        global shape, without vocabulary padding
    box          what this rank holds, one contiguous range per dimension; the whole shape when replicated over tp
    local_shape  shape in memory; larger than the box only in dim 0, by vocabulary padding, which comes last
    kind         decides weight decay
    std          standard deviation at the start; 0.0 means `fill` everywhere
    fill         the constant at the start where std is 0.0
    tp_sharded   tp ranks hold different boxes; False: each holds a replica
    tp_partial   a replica whose gradient is a partial sum on each tp rank (sequence parallelism): to be summed over tp
    state_group  the ranks that hold the same parameter; its gradient is the sum over them
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local_shape: tuple[int, ...]
    kind: ParameterKind
    std: float = 0.0
    fill: float = 0.0
    tp_sharded: bool = False
    tp_partial: bool = False
    state_group: StateGroup = StateGroup.REPLICAS

    @property
    def stored_numel(self) -> int:
        """Elements of the box: the leading ones of the local tensor, the rest is padding."""
        return math.prod(stop - start for start, stop in self.box)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)


def shard(
    name: str,
    shape: tuple[int, ...],
    kind: ParameterKind,
    *,
    dim: int | None = None,
    rank: int = 0,
    size: int = 1,
    padded: int | None = None,
    **rest: Any,
) -> ParameterSpec:
    """The spec of tp rank `rank` of `size`, split along `dim` (None: replicated).

    padded: rows in memory of dim 0 over all ranks, where that is more than are stored (vocabulary).
    Raises ValueError when dim is not divisible by size.
    """
    whole = tuple((0, n) for n in shape)
    if dim is None or size == 1:
        local = shape if padded is None else (padded, *shape[1:])
        return ParameterSpec(name, shape, whole, local, kind, **rest)
    extent = shape[dim] if padded is None else padded
    if extent % size:
        raise ValueError(f"{name}: dimension {dim} of {shape} is {extent}, not divisible by tp={size}")
    part = extent // size
    start, stop = (min(shape[dim], i * part) for i in (rank, rank + 1))
    box = (*whole[:dim], (start, stop), *whole[dim + 1 :])
    local = (*shape[:dim], part, *shape[dim + 1 :])
    return ParameterSpec(name, shape, box, local, kind, tp_sharded=True, **rest)


class Parameter(nn.Parameter):
    """An `nn.Parameter` with a `spec`; whoever sums its gradients sets `gradient_target`
    (`mpu.gradient.GradientTarget`).
    """

    spec: ParameterSpec
    gradient_target: Any

    def __new__(cls, spec: ParameterSpec, dtype: torch.dtype, device: torch.device | str) -> Parameter:
        parameter = super().__new__(cls, torch.empty(spec.local_shape, dtype=dtype, device=device))
        parameter.spec = spec
        parameter.gradient_target = None
        return parameter


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The spec of a parameter of a megazero model."""
    assert isinstance(parameter, Parameter), "every parameter of a stage is an mpu.parameter.Parameter"
    return parameter.spec
