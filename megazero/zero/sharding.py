"""ZeRO as a table: stage -> column of the model state -> replicated or sharded (arXiv:1910.02054).

The model states of the stages differ in this table only. The lists of a step follow from it (`zero.shape`): a sharded
gradient is reduced in every backward, sharded parameters are gathered for each use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch

from megazero.config.derive import shards_parameters
from megazero.config.dtypes import compute_dtype, state_dtype
from megazero.config.schema import OffloadConfig, OptimizerConfig, ParallelConfig


class Column(Enum):
    """The kinds of model state: the values that are kept for each element of a parameter."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MAX_EXP_AVG_SQ = "max_exp_avg_sq"
    EMA = "ema"

    __hash__ = object.__hash__  # columns are keys: that of Enum takes three times as long


OPTIMIZER = tuple(column for column in Column if column not in (Column.PARAMETER, Column.GRADIENT))
"""The columns that only an update reads."""
SAVED: Mapping[str, Column] = {"weight" if column is Column.MASTER else column.value: column for column in OPTIMIZER}
"""The columns of checkpoints, by their names there: the master weight, the first moment (of sgd its momentum), the
second moment, its maximum (where an optimizer keeps a third column), the moving average of the weights.
"""
AS_WEIGHTS = (Column.EMA,)
"""The columns that begin as the weights are, whatever these begin from. A checkpoint without them can be resumed."""


class Sharding(Enum):
    """How the neighbours that share out the state (`Axes.inner_ranks`) hold a column: each the whole, or each a shard.

    The words are those of torch.distributed.tensor.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


def _row(parameter: Sharding, gradient: Sharding, optimizer: Sharding) -> dict[Column, Sharding]:
    return {Column.PARAMETER: parameter, Column.GRADIENT: gradient, **dict.fromkeys(OPTIMIZER, optimizer)}


SHARDINGS: dict[int, dict[Column, Sharding]] = {
    0: _row(Sharding.REPLICATED, Sharding.REPLICATED, Sharding.REPLICATED),
    1: _row(Sharding.REPLICATED, Sharding.REPLICATED, Sharding.SHARDED),
    2: _row(Sharding.REPLICATED, Sharding.SHARDED, Sharding.SHARDED),
    3: _row(Sharding.SHARDED, Sharding.SHARDED, Sharding.SHARDED),
}
"""By ZeRO stage. Of a sharded gradient a rank keeps only its own range after a reduction."""


def overwrites_own(parallel: ParallelConfig, offload: OffloadConfig) -> bool:
    """Whether a gather of parameters overwrites the shard that this rank has updated: of whole ones in blocks of
    int8 (--zero-quantized-weights with ZeRO-1 or 2).
    """
    row = shardings(parallel, offload)
    sharded = row[Column.EXP_AVG] is Sharding.SHARDED
    return parallel.zero_quantized_weights and sharded and row[Column.PARAMETER] is Sharding.REPLICATED


def shardings(parallel: ParallelConfig, offload: OffloadConfig) -> dict[Column, Sharding]:
    """The row of a run: that of its stage, sharded parameters where `config.derive.shards_parameters` says so, and with
    --offload-gradients a rank keeps of a gradient what it updates.

    Raises ValueError for a stage that is not in the table.
    """
    if parallel.zero_stage not in SHARDINGS:
        raise ValueError(f"--zero-stage {parallel.zero_stage} is not one of {', '.join(map(str, SHARDINGS))}")
    row = SHARDINGS[parallel.zero_stage]
    more = {Column.PARAMETER: Sharding.SHARDED} if shards_parameters(parallel, offload) else {}
    if offload.offload_gradients:
        more[Column.GRADIENT] = row[Column.EXP_AVG]
    return row | more


def run_columns(
    optimizer: OptimizerConfig, parallel: ParallelConfig, offload: OffloadConfig
) -> dict[Column, torch.dtype]:
    """The columns of a run's model state, with their dtypes."""
    leaves = bool(offload.offload_optimizer or offload.offload_params)
    return columns(
        compute_dtype(optimizer.precision),
        state_dtype(optimizer.precision),
        optimizer.columns,
        apart=leaves or overwrites_own(parallel, offload) or optimizer.has_several_dtypes,
    )


def columns(
    parameter_dtype: torch.dtype, state_dtype: torch.dtype, kept: Sequence[str], *, apart: bool = False
) -> dict[Column, torch.dtype]:
    """The columns that exist, with their dtypes.

    A master weight exists only where the parameter has a narrower dtype, or `apart` says that the parameter cannot be
    its own master: what a gather brings overwrites what this rank has updated, one of the two does not rest on the
    device, or some parameters of the run are narrower than `parameter_dtype`. kept: beside the weights
    (`OptimizerConfig.columns`).
    """
    dtypes = {Column.PARAMETER: parameter_dtype, Column.GRADIENT: state_dtype}
    if parameter_dtype != state_dtype or apart:
        dtypes[Column.MASTER] = state_dtype
    return dtypes | dict.fromkeys(map(Column, kept), state_dtype)
