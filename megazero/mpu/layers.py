"""Tensor-parallel linear layers and the vocabulary-parallel embedding.

s sequence, b micro-batch, t = tp size. The first dimension of activations is the sequence. Under sequence parallelism
(sp) a layer takes or returns [s/t, b, ...]. Construction communicates nothing and leaves parameters uninitialised
(`mpu.random.initialise` sets them). In a group of one nothing is communicated.
(Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_ops.embedding import embedding, embedding_gradient
from megazero.mpu.fp8 import Fp8
from megazero.mpu.fp8_linear import fp8_linear, runs_fp8
from megazero.mpu.functional import reduce_from_tp, reduce_scatter_sequence
from megazero.mpu.gradient import route_gradient, target_of
from megazero.mpu.grid import Group
from megazero.mpu.linear import as_tuple, column_parallel_linear, column_parallel_linear_pair, plain_linear, with_bias
from megazero.mpu.lora import ColumnAdapter, LowRank, RowAdapter
from megazero.mpu.parameter import Parameter, ParameterKind, StateGroup, shard, spec_of

Device = torch.device | str


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W and b split over tp: [s(/t), b, in] -> [s, b, out/t].

    Rank r holds rows [r*out/t, (r+1)*out/t). std: standard deviation of the initial weight; biases start at 0.
    fp8: the run's FP8 state (`mpu.fp8`), which knows whether this layer is one of its layers.
    lora: the run's adapters (`mpu.lora`), which know whether this layer has one. Their dropout is keyed by `samples`,
    int64 [b].

    Communicates in forward: nothing (sp: all-gather of x along s). In backward: all-reduce of the input gradient (sp:
    all-gather of x, reduce-scatter of the input gradient), each overlapped with a GEMM. Raises ValueError when t does
    not divide out.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool,
        std: float,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: Device,
        fp8: Fp8 | None = None,
        lora: LowRank | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        shared_out = frozenset({"weight", "gradient"} | ({"input"} if sequence_parallel else set()))
        self.fp8 = None if fp8 is None else fp8.layer(name, shared_out)
        split = {"dim": 0, "rank": group.index, "size": group.size}
        weight = shard(f"{name}.weight", (out_features, in_features), ParameterKind.MATRIX, std=std, **split)
        self.weight = Parameter(weight, dtype, device)
        self.bias = (
            Parameter(shard(f"{name}.bias", (out_features,), ParameterKind.BIAS, **split), dtype, device)
            if bias
            else None
        )
        self.adapter: ColumnAdapter | None = None
        if lora is not None and lora.adapts(name):
            features = in_features, out_features
            self.adapter = ColumnAdapter(
                name, *features, group, lora, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        return self.adapted(x, self._product(x), samples)

    def adapted(self, x: Tensor, y: Tensor, samples: Tensor | None) -> Tensor:
        """The layer's product y plus the adapter's output, if the layer has an adapter."""
        return y if self.adapter is None else self.adapter(x, y, samples)

    def _product(self, x: Tensor) -> Tensor:
        if self.fp8 is not None and runs_fp8():
            return fp8_linear(x, (self.weight,), as_tuple(self.bias), self.fp8, self.group, self.sequence_parallel)
        return column_parallel_linear(x, self.weight, self.bias, self.group, self.sequence_parallel)


def column_parallel_pair(
    gate: ColumnParallelLinear, up: ColumnParallelLinear, x: Tensor, samples: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(gate(x), up(x)), [s, b, out/t] each, with one gather of x and one reduction of its gradient for both.

    It is one GEMM when the two weights are adjacent in one storage (ZeRO's buckets pack them so), else two.
    Communicates as one `ColumnParallelLinear`.
    """
    assert gate.group is up.group and gate.sequence_parallel == up.sequence_parallel
    if gate.fp8 is not None and runs_fp8():
        biases = (*as_tuple(gate.bias), *as_tuple(up.bias))
        both = fp8_linear(x, (gate.weight, up.weight), biases, gate.fp8, gate.group, gate.sequence_parallel)
        first, second = both.split([gate.weight.shape[0], up.weight.shape[0]], dim=-1)
    else:
        pair = (gate.weight, up.weight), (gate.bias, up.bias)
        first, second = column_parallel_linear_pair(x, *pair, gate.group, gate.sequence_parallel)
    return gate.adapted(x, first, samples), up.adapted(x, second, samples)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W split over tp: [s, b, in/t] -> [s(/t), b, out].

    The bias is replicated and added once, after the reduction; under sp its gradient is a partial sum (`tp_partial`).
    std, fp8 and lora as in `ColumnParallelLinear`.

    Communicates in forward: all-reduce (sp: reduce-scatter along s) of the output. In backward: nothing (sp: all-gather
    of the output gradient). Raises ValueError when t does not divide in, or under sp s.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        group: Group,
        *,
        bias: bool,
        std: float,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: Device,
        fp8: Fp8 | None = None,
        lora: LowRank | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.fp8 = None if fp8 is None else fp8.layer(name, frozenset({"input", "weight"}))
        weight = shard(
            f"{name}.weight",
            (out_features, in_features),
            ParameterKind.MATRIX,
            dim=1,
            rank=group.index,
            size=group.size,
            std=std,
        )
        self.weight = Parameter(weight, dtype, device)
        partial = sequence_parallel and group.size > 1
        self.bias = (
            Parameter(shard(f"{name}.bias", (out_features,), ParameterKind.BIAS, tp_partial=partial), dtype, device)
            if bias
            else None
        )
        self.adapter: RowAdapter | None = None
        if lora is not None and lora.adapts(name):
            features = in_features, out_features
            self.adapter = RowAdapter(
                name, *features, group, lora, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

    def forward(self, x: Tensor, samples: Tensor | None = None) -> Tensor:
        y = self._reduced(x)
        return y if self.adapter is None else self.adapter(x, y, samples)

    def _reduced(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._product(x, self.bias)
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp
        return with_bias(reduce(self._product(x, None), self.group), self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.fp8 is not None and runs_fp8():
            return fp8_linear(x, (self.weight,), as_tuple(bias), self.fp8, None, False)
        return plain_linear(x, self.weight, bias)


class _Lookup(torch.autograd.Function):
    """An embedding lookup whose backward adds each row's gradient to the table's gradient target.

    No gradient of the table's size is made.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.target = target_of(weight)
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ids, weight = ctx.saved_tensors
        return None, route_gradient(weight, ctx.target, partial(embedding_gradient, ids, grads[0]))


def _lookup(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: ids [...], weight [v/t, h] -> [..., h]."""
    if target_of(weight) is None:
        return embedding(ids, weight)
    rows: Tensor = _Lookup.apply(ids, weight)
    return rows


class VocabParallelEmbedding(nn.Module):
    """A token embedding with the rows of its table split over tp: tokens int64 [b, s] in [0, vocab) -> [s(/t), b, h].

    The rank that holds a token's row looks it up; the others add zeros. Rows from `vocab` on are padding and exist only
    in memory. A tied head uses the same `weight` [padded_vocab/t, h]. state_group: see `ParameterSpec`.

    Communicates in forward: all-reduce (sp: reduce-scatter along s). In backward: nothing (sp: all-gather). Raises
    ValueError when t does not divide padded_vocab, or under sp s.
    """

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        padded_vocab: int,
        group: Group,
        *,
        std: float,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: Device,
        state_group: StateGroup,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.vocab = group, sequence_parallel, vocab
        spec = shard(
            f"{name}.weight",
            (vocab, hidden),
            ParameterKind.EMBEDDING,
            dim=0,
            rank=group.index,
            size=group.size,
            padded=padded_vocab,
            std=std,
            state_group=state_group,
        )
        self.weight = Parameter(spec, dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        if self.group.size == 1:
            return _lookup(tokens, self.weight)
        start, stop = spec_of(self.weight).box[0]
        elsewhere = (tokens < start) | (tokens >= stop)
        # Tokens of other ranks look up some row, spread by modulo: gradients of one row are summed token by token.
        rows = _lookup((tokens - start) % self.weight.shape[0], self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp)(rows, self.group)
