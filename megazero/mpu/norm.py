"""LayerNorm and RMSNorm as modules whose parameters have a spec."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_ops.layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
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
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [..., h] -> [..., h].

    (Zhang and Sennrich 2019, arXiv:1910.07467.) Dtypes as in `LayerNorm`. Nothing is communicated.
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

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual, its normalisation), in one pass over both."""
        return add_rms_norm(x, residual, self.weight, self.eps)
