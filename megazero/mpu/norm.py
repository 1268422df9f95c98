"""LayerNorm, RMSNorm and the norm of queries and keys as modules whose parameters have a spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_ops.graph import apply_or_forward
from fused_ops.head_norm import AllHeads, norm_heads
from fused_ops.layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group
from megazero.mpu.parameter import Parameter, ParameterKind, ParameterSpec, shard


def _spec(name: str, hidden: int, group: Group, sequence_parallel: bool, fill: float) -> ParameterSpec:
    # Under sequence parallelism a rank normalises its own positions only: its gradient is a partial sum over tp.
    return shard(name, (hidden,), ParameterKind.NORM, fill=fill, tp_partial=sequence_parallel and group.size > 1)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, [..., h] -> [..., h].

    (Ba et al. 2016, arXiv:1607.06450.) 16-bit inputs are computed in fp32 and rounded once, fp32 and fp64 in their own
    dtype. Nothing is communicated.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        eps: float,
        group: Group,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(_spec(f"{name}.weight", hidden, group, sequence_parallel, 1.0), dtype, device)
        self.bias = Parameter(_spec(f"{name}.bias", hidden, group, sequence_parallel, 0.0), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual, its normalisation), in one pass over both."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, [..., h] -> [..., h].

    (Zhang and Sennrich 2019, arXiv:1910.07467.) offset: 1 for the norm of Gemma, whose weight then begins at 0. Dtypes
    as in `LayerNorm`. Nothing is communicated.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        eps: float,
        group: Group,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        spec = _spec(f"{name}.weight", hidden, group, sequence_parallel, 1.0 - offset)
        self.weight = Parameter(spec, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual, its normalisation), in one pass over both."""
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class _NormAllHeads(torch.autograd.Function):
    """Saves mixed, the weights and two scales per position. A rank's part of the sums goes through one all-reduce."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        groups: int,
        repeats: int,
        eps: float,
        offset: float,
        group: Group,
    ) -> Tensor:
        heads = AllHeads(mixed, query_weight, key_weight, groups, repeats, offset)
        scale = _mean(heads.squares(), query_weight, key_weight, group).add_(eps).rsqrt_()
        ctx.save_for_backward(mixed, query_weight, key_weight, scale)
        ctx.shape, ctx.group = (groups, repeats, offset), group
        return heads.scaled(scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mixed, query_weight, key_weight, scale = ctx.saved_tensors
        heads = AllHeads(mixed, query_weight, key_weight, *ctx.shape)
        inner = _mean(heads.products(grads[0]), query_weight, key_weight, ctx.group)
        return *heads.gradients(grads[0], scale, inner), None, None, None, None, None


def _mean(sums: Tensor, query_weight: Tensor, key_weight: Tensor, group: Group) -> Tensor:
    """Sums [2, s, b] over this rank's elements, queries and keys -> means over the elements of all ranks, in place."""
    if group.size > 1:
        all_reduce(sums, group).wait()
    for total, weight in zip(sums, (query_weight, key_weight), strict=True):
        total /= weight.numel() * group.size
    return sums


class QueryKeyNorm(nn.Module):
    """RMSNorm of queries and keys, not values, in the mixed projection: [s, b, g(r + 2)d/t] -> the same.

    kind "head": over each head, with one weight [d] for all query heads and one for all key heads (Qwen 3, Gemma 3).
    kind "l2": over each head, without a weight (Llama 4). kind "all": over all query heads together, and over all key
    heads, of all tp ranks, with a weight [n d] and a weight [g d] (OLMo 2).

    groups: g, the key-value heads of the model. name: of the attention, whose parameters are `query_norm.weight` and
    `key_norm.weight`. offset: is added to weights, which begin at 1 - offset.

    Communicates for "all" an all-reduce of 2 s b sums in forward and one in backward, in the dtype of the computation
    (fp32 for 16 bits); else nothing. The weights of "head" are replicated, and each tp rank has the gradient of its own
    heads. Raises ValueError for an unknown kind, and where t does not divide g.
    """

    KINDS = ("head", "all", "l2")

    def __init__(
        self,
        name: str,
        kind: str,
        groups: int,
        repeats: int,
        head_dim: int,
        eps: float,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise ValueError(f"the norm of queries and keys is {', '.join(self.KINDS)}, not {kind!r}")
        if groups % group.size:
            raise ValueError(f"{groups} key-value heads are not divisible by tp={group.size}")
        self.kind, self.group, self.eps, self.offset = kind, group, eps, offset
        self.groups, self.repeats = groups // group.size, repeats
        self.query_weight, self.key_weight = None, None
        if kind != "l2":
            heads = {"query": groups * repeats, "key": groups} if kind == "all" else {"query": 1, "key": 1}
            self.query_weight, self.key_weight = (
                Parameter(self._spec(f"{name}.{which}_norm.weight", count * head_dim), dtype, device)
                for which, count in heads.items()
            )

    def _spec(self, name: str, size: int) -> ParameterSpec:
        if self.kind == "all":
            split = {"dim": 0, "rank": self.group.index, "size": self.group.size}
            return shard(name, (size,), ParameterKind.NORM, **split, fill=1.0 - self.offset)
        partial = self.group.size > 1  # with sequence parallelism and without: each rank has other heads
        return shard(name, (size,), ParameterKind.NORM, fill=1.0 - self.offset, tp_partial=partial)

    def forward(self, mixed: Tensor) -> Tensor:
        shape = self.groups, self.repeats
        if self.kind == "all":
            weights = self.query_weight, self.key_weight
            result: Tensor = apply_or_forward(_NormAllHeads, mixed, *weights, *shape, self.eps, self.offset, self.group)
            return result
        return norm_heads(mixed, *shape, self.query_weight, self.key_weight, self.eps, self.offset)
