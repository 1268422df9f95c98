"""Parameters and their specs: which part of which global tensor a rank holds.

Initialisation, gradient norm, ZeRO, checkpoints and conversion read a parameter's `ParameterSpec` only. They do not
match patterns of names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

ModuleType = TypeVar("ModuleType", bound=nn.Module)
Box = tuple[tuple[int, int], ...]
"""One half-open range per dimension of a global tensor."""


class ParameterKind(Enum):
    """The kind of a parameter. Matrices and embeddings have weight decay, biases and norms have none."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    BIAS = "bias"
    NORM = "norm"

    @property
    def decays(self) -> bool:
        return self in (ParameterKind.MATRIX, ParameterKind.EMBEDDING)


class StateGroup(Enum):
    """The ranks that hold the same parameter: they sum its gradient and shard its state.

    `Axes.state_ranks` and `ProcessGrid.state_group` give these ranks.
    """

    REPLICAS = "replicas"
    """dp x cp: for parameters that are on one stage."""
    TIED = "tied"
    """Stages x replicas: for a tied embedding that is on the first and the last, or what units of a user share."""

    @property
    def spans_stages(self) -> bool:
        """Whether its members are on several stages, and so reduce at different points of their schedules."""
        return self is StateGroup.TIED


@dataclass(frozen=True)
class ParameterSpec:
    """What a rank holds of one parameter: which part of the global tensor, and its initial values.

    name         global name, the same on every layout: "blocks.3.attention.qkv.weight"
    shape        global shape, without vocabulary padding
    box          what this rank holds: one half-open range per dimension; the whole shape when replicated over tp
    local_shape  shape in memory; larger than the box only in dim 0, by the rows of vocabulary padding at its end
    kind         decides weight decay
    std          standard deviation of the initial values; 0.0: all are `fill`
    fill         the initial value where std is 0.0
    tp_sharded   whether tp ranks hold different boxes; False: each holds a replica
    tp_partial   whether each tp rank's gradient of a replica is a partial sum, which must be summed over tp (sequence
                 parallelism)
    state_group  the ranks that hold the same parameter and sum its gradient
    keep_whole   whether every rank keeps all of it where parameters are sharded: it is used outside of its unit
    parts_dim    a dimension of the parameter that `shape` and `box` have as two, this one and the next: the number of
                 equal parts that tp cuts each, and the extent of a part; None: they have the parameter's dimensions
    dtype        its own, where parameters of one run have several dtypes; None: that of the run's precision
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
    keep_whole: bool = False
    parts_dim: int | None = None
    dtype: torch.dtype | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        return self.shape if self.parts_dim is None else merged(self.shape, self.parts_dim)

    @property
    def stored_numel(self) -> int:
        """Elements of the box. They come first in the local tensor; the rest is padding."""
        return math.prod(stop - start for start, stop in self.box)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)


def merged(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """A shape with dimensions `dim` and `dim` + 1 as one."""
    return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


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
    """The spec of tp rank `rank` of `size` for a parameter that is split along `dim` (None: replicated).

    padded: rows of dim 0 over all ranks, where padding makes them more than shape[0] (vocabulary). rest: further fields
    of `ParameterSpec`. Raises ValueError when size does not divide the dimension.
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
    """An uninitialised `nn.Parameter` of shape spec.local_shape with its `spec`.

    gradient_target: a `mpu.gradient.GradientTarget`, set by the gradient reducer; None without one.
    """

    spec: ParameterSpec
    gradient_target: Any

    def __new__(cls, spec: ParameterSpec, dtype: torch.dtype, device: torch.device | str) -> Parameter:
        parameter = super().__new__(cls, torch.empty(spec.local_shape, dtype=dtype, device=device))
        parameter.spec = spec
        parameter.gradient_target = None
        return parameter

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.detach()!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain one, with the same values."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def set_away(self, is_away: bool) -> None:
        """Called where its memory has been freed until the next use, and where it has memory again."""


def become_parameter(
    parameter: nn.Parameter, kind: type[Parameter], spec: ParameterSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Make a plain `nn.Parameter` one of ours, uninitialised: what holds it elsewhere holds the same object then."""
    parameter.data, parameter.grad = torch.empty(spec.local_shape, dtype=dtype, device=device), None
    parameter.__class__ = kind
    assert isinstance(parameter, Parameter)
    parameter.spec, parameter.gradient_target = spec, None


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The spec of a parameter of a megazero model."""
    assert isinstance(parameter, Parameter), "every parameter of a stage is an mpu.parameter.Parameter"
    return parameter.spec


def own_box(whole: Tensor, spec: ParameterSpec) -> Tensor:
    """A rank's box of a global tensor, as a view."""
    assert tuple(whole.shape) == spec.shape, (spec.name, whole.shape)
    return whole[tuple(slice(start, stop) for start, stop in spec.box)]


def without_memory(module: ModuleType) -> ModuleType:
    """The module, with the memory of its parameters freed. Their shapes stay; a model state gives them memory again."""
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)
    return module
