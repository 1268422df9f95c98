"""The model's shape and its layout on this rank, from which every layer is built."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch

from fused_ops.attention.selection import NOTHING_TRIED, AttentionSupport
from megazero.config.derive import NONE, RECOMPUTE, RecomputeTable
from megazero.config.inventory import ATTENTION, Linear, block, linears
from megazero.config.layers.kinds import NO_NORM, Layer, kinds, layers
from megazero.config.schema import ModelConfig
from megazero.mpu.fp8 import Fp8
from megazero.mpu.grid import Group
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megazero.mpu.lora import LowRank
from megazero.mpu.norm import LayerNorm, QueryKeyNorm, RMSNorm
from megazero.mpu.random import sequence_offset

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelLayout:
    """The model and its layout on this rank; an argument of every layer's constructor.

    model                the model's shape
    tp                   tensor-parallel group; construction reads only its size and index
    dtype                dtype of parameters, activations and messages between stages
    sequence_parallel    whether activations outside the tensor-parallel regions are sharded along s
    recompute            what backward computes again, for every block of the model by its global number: none,
                         selective (the attention core) or full (the whole block); empty: none of any block
    shard_recompute_inputs  whether each tp rank keeps a part of the input of a block that is recomputed as a whole
    seed                 keys dropout
    label_smoothing      of the training loss; evaluation uses none
    z_loss               weight of the z-loss in the training loss; evaluation uses none
    compile              whether ops of the blocks without a kernel run through torch.compile
    attention            the way of computing attention that the run asks for, and those that this rank has
    fp8                  the state of FP8 products; None: all products are of `dtype`
    lora                 low-rank adapters of the blocks' linear layers, which alone are trained; None: no adapters, all
                         parameters are trained
    allocate             whether parameters keep their memory. Without it a model is made unit by unit, and at most one
                         unit has memory at a time; a model state gives the parameters theirs

    Raises ValueError for an unknown word in `recompute`, and for a table of another length than the model.
    """

    model: ModelConfig
    tp: Group
    dtype: torch.dtype
    _: KW_ONLY
    device: torch.device = CPU
    sequence_parallel: bool = False
    recompute: RecomputeTable = ()
    shard_recompute_inputs: bool = False
    seed: int = 1234
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    compile: bool = False
    attention: AttentionSupport = NOTHING_TRIED
    fp8: Fp8 | None = None
    lora: LowRank | None = None
    allocate: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(set(self.recompute) - set(RECOMPUTE))
        if unknown:
            raise ValueError(f"recompute of a block is {unknown[0]!r}, not one of {', '.join(RECOMPUTE)}")
        if self.recompute and len(self.recompute) != self.model.num_layers:
            raise ValueError(f"recompute has {len(self.recompute)} words for {self.model.num_layers} blocks")

    @property
    def std(self) -> float:
        """Standard deviation of initial weights."""
        return self.model.init_method_std

    @property
    def output_std(self) -> float:
        """The same for layers that write into the residual stream: std / sqrt(2 L), as in GPT-2 and BLOOM."""
        return self.model.init_method_std / math.sqrt(2 * self.model.num_layers)

    @property
    def placed(self) -> dict[str, Any]:
        """Arguments of every parallel layer that describe this rank."""
        return {"sequence_parallel": self.sequence_parallel, "dtype": self.dtype, "device": self.device}

    @property
    def linear(self) -> dict[str, Any]:
        """Arguments of every linear layer of a block: `placed` with FP8 and adapters."""
        return self.placed | {"fp8": self.fp8, "lora": self.lora}

    def column(self, number: int, name: str) -> ColumnParallelLinear:
        """A column-parallel linear layer of block `number`. name: as in `config.inventory`."""
        entry = self._linears[self.layer(number)][name]
        assert entry.tp_axis == 0
        name = f"{block(number)}.{name}"
        return ColumnParallelLinear(
            name, entry.inputs, entry.outputs, self.tp, bias=entry.bias, std=self.std, **self.linear
        )

    def row(self, number: int, name: str) -> RowParallelLinear:
        """A row-parallel linear layer of block `number`, which writes into the residual stream."""
        entry = self._linears[self.layer(number)][name]
        assert entry.tp_axis == 1
        name = f"{block(number)}.{name}"
        return RowParallelLinear(
            name, entry.inputs, entry.outputs, self.tp, bias=entry.bias, std=self.output_std, **self.linear
        )

    def layer(self, number: int) -> Layer:
        """What the layer with this global number computes."""
        return layers(self.model)[number]

    @cached_property
    def _linears(self) -> dict[Layer, dict[str, Linear]]:
        return {layer: {linear.name: linear for linear in linears(layer)} for layer in kinds(self.model)}

    def recompute_of(self, number: int) -> str:
        """What backward computes again of the block with this global number: none, selective or full."""
        return self.recompute[number] if self.recompute else NONE

    def sequence_offset(self, local_length: int) -> int:
        """Global position of the first of this rank's `local_length` positions outside the tensor-parallel regions."""
        return sequence_offset(local_length, self.tp, self.sequence_parallel)

    def norm(self, name: str) -> LayerNorm | RMSNorm:
        """The model's kind of normalisation over h: [s(/t), b, h] -> the same."""
        model = self.model
        of_rank = self.tp, self.sequence_parallel, self.dtype, self.device
        if model.norm == "rmsnorm":
            return RMSNorm(name, model.hidden_size, model.norm_epsilon, *of_rank, offset=self.norm_offset)
        return LayerNorm(name, model.hidden_size, model.norm_epsilon, *of_rank)

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of RMSNorm."""
        return 1.0 if self.model.norm_plus_one else 0.0

    def query_key_norm(self, number: int) -> QueryKeyNorm | None:
        """The norm of queries and keys of block `number`, which stands behind their projection; None: it has none."""
        mixer = self.layer(number).mixer
        if mixer.norm == NO_NORM:
            return None
        return QueryKeyNorm(
            f"{block(number)}.{ATTENTION}",
            mixer.norm,
            mixer.groups,
            mixer.heads // mixer.groups,
            mixer.size,
            self.model.norm_epsilon,
            self.tp,
            dtype=self.dtype,
            device=self.device,
            offset=self.norm_offset,
        )
