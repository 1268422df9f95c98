"""What every layer of a model is built from: the model's shape and how it lies on this rank."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch

from fused_ops.attention.rule import NOTHING_TRIED, AttentionSupport
from megazero.config.inventory import Linear, block, linears
from megazero.config.schema import ModelConfig
from megazero.mpu.fp8 import Fp8
from megazero.mpu.grid import Group
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megazero.mpu.lora import LowRank
from megazero.mpu.norm import LayerNorm, RMSNorm
from megazero.mpu.random import sequence_offset

CPU = torch.device("cpu")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelLayout:
    """The model and how this rank holds it; an argument of every layer's constructor.

    dtype                of parameters, activations and messages between stages
    tp                   tensor-parallel group; only its ranks and index are read while building
    sequence_parallel    activations outside the tensor-parallel regions are sharded along s
    recompute            none, selective (the attention core), full (whole blocks)
    recompute_num_layers with full: blocks whose global number is a multiple of this
    seed                 keys dropout
    compile              ops of the blocks without a kernel run what torch.compile makes of them
    attention            what the run asks for, and this rank has, to compute attention with
    fp8                  the state of FP8 products; None: all products are of `dtype`
    lora                 low-rank adapters beside linear layers of the blocks, and nothing else is trained; None:
    everything is
    label_smoothing, z_loss  of the training loss; evaluation is plain cross-entropy
    """

    model: ModelConfig
    tp: Group
    dtype: torch.dtype
    _: KW_ONLY
    device: torch.device = CPU
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_num_layers: int = 1
    seed: int = 1234
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    compile: bool = False
    attention: AttentionSupport = NOTHING_TRIED
    fp8: Fp8 | None = None
    lora: LowRank | None = None

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}, not one of {', '.join(RECOMPUTE)}")
        if self.recompute_num_layers < 1:
            raise ValueError(f"recompute_num_layers is {self.recompute_num_layers}, less than 1")

    @property
    def std(self) -> float:
        """Standard deviation of weights at the start."""
        return self.model.init_method_std

    @property
    def output_std(self) -> float:
        """That of the layers which write into the residual stream: std / sqrt(2 L), as in GPT-2 and BLOOM."""
        return self.model.init_method_std / math.sqrt(2 * self.model.num_layers)

    @property
    def placed(self) -> dict[str, Any]:
        """What every parallel layer is told about this rank."""
        return {"sequence_parallel": self.sequence_parallel, "dtype": self.dtype, "device": self.device}

    @property
    def linear(self) -> dict[str, Any]:
        """What every linear layer of a block is told beside that."""
        return self.placed | {"fp8": self.fp8, "lora": self.lora}

    def column(self, number: int, name: str) -> ColumnParallelLinear:
        """A linear layer of block `number` whose outputs tp ranks share out."""
        entry = self._linears[name]
        assert entry.tp_axis == 0
        name = f"{block(number)}.{name}"
        return ColumnParallelLinear(
            name, entry.inputs, entry.outputs, self.tp, bias=entry.bias, std=self.std, **self.linear
        )

    def row(self, number: int, name: str) -> RowParallelLinear:
        """A linear layer of block `number` whose inputs tp ranks share out; it writes into the residual stream."""
        entry = self._linears[name]
        assert entry.tp_axis == 1
        name = f"{block(number)}.{name}"
        return RowParallelLinear(
            name, entry.inputs, entry.outputs, self.tp, bias=entry.bias, std=self.output_std, **self.linear
        )

    @cached_property
    def _linears(self) -> dict[str, Linear]:
        return {linear.name: linear for linear in linears(self.model)}

    def recomputes_block(self, number: int) -> bool:
        """Whether the block with this global number is recomputed in backward as a whole."""
        return self.recompute == "full" and number % self.recompute_num_layers == 0

    def sequence_offset(self, local_length: int) -> int:
        """Global position of the first of `local_length` positions that this rank holds outside the tensor-parallel
        regions.
        """
        return sequence_offset(local_length, self.tp, self.sequence_parallel)

    def norm(self, name: str) -> LayerNorm | RMSNorm:
        """The configured normalisation over h: [s(/t), b, h] -> the same."""
        kind = RMSNorm if self.model.norm == "rmsnorm" else LayerNorm
        return kind(
            name,
            self.model.hidden_size,
            self.model.norm_epsilon,
            self.tp,
            self.sequence_parallel,
            self.dtype,
            self.device,
        )
