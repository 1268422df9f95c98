"""Low-rank adapters of tensor-parallel linear layers (LoRA: Hu et al. 2021, arXiv:2106.09685).

y = W x + scale B A x with W frozen, A [r, in], B [out, r]. One of A and B is split over tp as W is, the other is
replicated. All that an adapter communicates is r wide: a column-parallel layer's input is not gathered for A (under
sequence parallelism each rank multiplies its own positions), and a row-parallel layer sums A x over tp before B.

B starts at 0, so an adapter changes nothing at first. A starts from a normal distribution with the standard deviation
of PEFT's uniform one, 1 / sqrt(3 in). It is drawn by global index, as all weights are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megazero.config.derive import lora_scale, query_groups
from megazero.config.inventory import adapted
from megazero.config.layers.kinds import ffn_widths
from megazero.config.schema import LoraConfig, ModelConfig
from megazero.mpu.functional import reduce_from_tp, reduce_scatter_sequence
from megazero.mpu.grid import Group
from megazero.mpu.linear import column_parallel_linear, plain_linear
from megazero.mpu.parameter import Parameter, ParameterKind, shard
from megazero.mpu.random import DropoutKey, hidden_dropout, sequence_offset, sliced_dropout

Device = torch.device | str


@dataclass(frozen=True)
class LowRank:
    """Which linear layers are adapted, and how.

    rank     r
    scale    factor of the adapter's output
    targets  the layers that get an adapter, by the last part of their names
    dropout  probability with which A's input is dropped in training
    seed     the run's seed, which keys the dropout
    slices   number of equal parts of a row-parallel layer's input features, each with dropout keys of its own, so that
             masks do not depend on tp. Every tp that the model allows divides it
    """

    rank: int
    scale: float
    targets: frozenset[str]
    dropout: float = 0.0
    seed: int = 0
    slices: int = 1

    def adapts(self, name: str) -> bool:
        """Whether the layer of this global name gets an adapter."""
        return name.rpartition(".")[2] in self.targets


def low_rank(lora: LoraConfig, model: ModelConfig, seed: int = 0) -> LowRank | None:
    """The adapters of a run; None without --lora-rank. seed: the run's."""
    if lora.lora_rank is None:
        return None
    slices = math.gcd(query_groups(model), *ffn_widths(model))
    return LowRank(lora.lora_rank, lora_scale(lora), frozenset(adapted(lora, model)), lora.lora_dropout, seed, slices)


class Adapter(nn.Module):
    """An adapter: `forward(x, y, samples)` returns y + scale B A dropout(x) for a layer's input x and output y.

    x and y have the shapes of the layer. samples: int64 [b], the run's numbers of the samples; None without dropout.
    """

    splits_rows: ClassVar[bool]
    """Whether tp splits the rows of B; else it splits the columns of A."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        group: Group,
        low_rank: LowRank,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.scale = group, sequence_parallel, low_rank.scale
        self.p, self.slices = low_rank.dropout, low_rank.slices
        self.key = DropoutKey(low_rank.seed, 0, name)
        split: dict[str, Any] = {"rank": group.index, "size": group.size}
        # Under sequence parallelism each rank multiplies its own positions by the replicated matrix: partial gradients.
        whole: dict[str, Any] = {"tp_partial": sequence_parallel and group.size > 1}
        to_a, to_b = (whole, {"dim": 0, **split}) if self.splits_rows else ({"dim": 1, **split}, whole)
        rank, std = low_rank.rank, 1 / math.sqrt(3 * in_features)
        a = shard(f"{name}.lora_a", (rank, in_features), ParameterKind.MATRIX, std=std, **to_a)
        b = shard(f"{name}.lora_b", (out_features, rank), ParameterKind.MATRIX, **to_b)
        self.lora_a, self.lora_b = Parameter(a, dtype, device), Parameter(b, dtype, device)

    def forward(self, x: Tensor, y: Tensor, samples: Tensor | None) -> Tensor:
        raise NotImplementedError

    def dropped(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """A's input: x, in training with dropout."""
        if self.p == 0.0 or not self.training:
            return x
        assert samples is not None, "dropout is keyed by samples"
        return self.drop(x, samples)

    def drop(self, x: Tensor, samples: Tensor) -> Tensor:
        raise NotImplementedError


class ColumnAdapter(Adapter):
    """Adapter of a column-parallel layer: A replicated, B's rows split. x [s(/t), b, in], y [s, b, out/t].

    Communicates in forward: nothing (sp: all-gather of A x along s). In backward: all-reduce of the gradient of A x
    (sp: all-gather of A x, reduce-scatter of its gradient).
    """

    splits_rows = True

    def forward(self, x: Tensor, y: Tensor, samples: Tensor | None) -> Tensor:
        low = plain_linear(self.dropped(x, samples), self.lora_a, None) * self.scale
        return y + column_parallel_linear(low, self.lora_b, None, self.group, self.sequence_parallel)

    def drop(self, x: Tensor, samples: Tensor) -> Tensor:
        return hidden_dropout(
            x, self.p, self.key, samples, sequence_offset(x.shape[0], self.group, self.sequence_parallel)
        )


class RowAdapter(Adapter):
    """Adapter of a row-parallel layer: A's columns split, B replicated. x [s, b, in/t], y [s(/t), b, out] (summed).

    Communicates in forward: all-reduce of A x (sp: reduce-scatter along s). In backward: nothing (sp: all-gather of the
    gradient of A x).
    """

    splits_rows = False

    def forward(self, x: Tensor, y: Tensor, samples: Tensor | None) -> Tensor:
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp
        low = reduce(plain_linear(self.dropped(x, samples), self.lora_a, None), self.group) * self.scale
        return y + plain_linear(low, self.lora_b, None)

    def drop(self, x: Tensor, samples: Tensor) -> Tensor:
        slices = self.slices // self.group.size
        return sliced_dropout(x, self.p, self.key, samples, slices, self.group.index * slices)


def freeze_all_but_adapters(module: nn.Module) -> None:
    """Freeze all parameters of the module but those of adapters."""
    module.requires_grad_(False)
    for part in module.modules():
        if isinstance(part, Adapter):
            part.requires_grad_(True)
