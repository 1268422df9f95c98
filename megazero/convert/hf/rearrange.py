"""How Hugging Face's tensors become ours, each function with its inverse.

n heads, g key-value heads, r = n/g, d head dim. The result is a view of theirs where that is possible; only joining
takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.derive import head_dim, query_groups
from megazero.config.schema import ModelConfig


@dataclass(frozen=True)
class Rearrangement:
    """ours: their tensors -> our tensor. theirs: the inverse.

    Both also take tensors on the device "meta", to find out shapes.
    """

    ours: Callable[[ModelConfig, Sequence[Tensor]], Tensor]
    theirs: Callable[[ModelConfig, Tensor], list[Tensor]]


def _thirds_to_heads(model: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    """[q | k | v] over the whole width, [3, n, d, ...] -> [n, 3, d, ...]."""
    (tensor,) = tensors
    return tensor.unflatten(0, (3, model.num_attention_heads, head_dim(model))).transpose(0, 1).flatten(0, 2)


def _heads_to_thirds(model: ModelConfig, tensor: Tensor) -> list[Tensor]:
    return [tensor.unflatten(0, (model.num_attention_heads, 3, head_dim(model))).transpose(0, 1).flatten(0, 2)]


def _separate_to_groups(model: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    """q [n, d, ...], k and v [g, d, ...] -> [g, r + 2, d, ...]."""
    groups, size = query_groups(model), head_dim(model)
    return torch.cat([tensor.unflatten(0, (groups, -1, size)) for tensor in tensors], dim=1).flatten(0, 2)


def _groups_to_separate(model: ModelConfig, tensor: Tensor) -> list[Tensor]:
    groups, size = query_groups(model), head_dim(model)
    repeats = model.num_attention_heads // groups
    parts = tensor.unflatten(0, (groups, repeats + 2, size)).split([repeats, 1, 1], dim=1)
    return [part.flatten(0, 2) for part in parts]


def _transposed_thirds(model: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    return _thirds_to_heads(model, [tensors[0].t()])


def _fused_to_groups(model: ModelConfig, tensors: Sequence[Tensor]) -> Tensor:
    """[q | k | v] over the whole width, [n + 2g, d, ...] -> [g, r + 2, d, ...]."""
    groups = query_groups(model)
    parts = tensors[0].unflatten(0, (model.num_attention_heads + 2 * groups, head_dim(model)))
    return _separate_to_groups(
        model, [part.flatten(0, 1) for part in parts.split([model.num_attention_heads, groups, groups])]
    )


def _half(number: int) -> Rearrangement:
    """One of two of our tensors that are one of theirs, one behind the other. `theirs` has that one's shape alone."""
    return Rearrangement(
        lambda _, tensors: tensors[0].chunk(2)[number], lambda _, tensor: [torch.cat([tensor, tensor])]
    )


SAME = Rearrangement(lambda _, t: t[0], lambda _, t: [t])
TRANSPOSED = Rearrangement(lambda _, t: t[0].t(), lambda _, t: [t.t()])
THIRDS = Rearrangement(_thirds_to_heads, _heads_to_thirds)
TRANSPOSED_THIRDS = Rearrangement(_transposed_thirds, lambda model, t: [_heads_to_thirds(model, t)[0].t()])
SEPARATE = Rearrangement(_separate_to_groups, _groups_to_separate)
FUSED = Rearrangement(_fused_to_groups, lambda model, tensor: [torch.cat(_groups_to_separate(model, tensor))])
FIRST_HALF, SECOND_HALF = _half(0), _half(1)
