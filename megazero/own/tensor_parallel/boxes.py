"""A parameter of which each tp rank has a part, and the whole of it."""

from __future__ import annotations

from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterSpec, own_box
from megazero.own.tensor_parallel.words import ParameterSplit


def part_of(whole: Tensor, spec: ParameterSpec) -> Tensor:
    """A rank's part, spec.local_shape, of a global tensor: new memory, in which padding is zeros."""
    box = own_box(whole.reshape(spec.shape), spec)
    part = whole.new_zeros(spec.local_numel)
    part[: box.numel()].view(box.shape).copy_(box)
    return part.view(spec.local_shape)


def whole_of(part: Tensor, split: ParameterSplit, shape: tuple[int, ...], group: Group) -> Tensor:
    """The global tensor of this shape, in new memory, of the parts of all tp ranks. One all-gather of the group."""
    parts = part.new_empty(group.size, *part.shape)
    collectives.all_gather(parts, part.detach().contiguous(), group).wait()
    in_parts = parts.view(group.size, *split.shape_in_parts(tuple(part.shape)))
    dim = split.dim + (split.parts > 1)
    joined = in_parts.movedim(0, dim)  # [..., t, n/t, ...]
    whole = joined.reshape(*part.shape[: split.dim], group.size * part.shape[split.dim], *part.shape[split.dim + 1 :])
    return whole.narrow(split.dim, 0, shape[split.dim]).contiguous()
