"""ZeRO as a table: stage -> column of the model state -> replicated or sharded (arXiv:1910.02054).

The model states of the stages differ in this table only. The lists of a step follow from it (`zero.shape`): a sharded
gradient is reduced in every backward, sharded parameters are gathered for each use.
"""

from __future__ import annotations

from enum import Enum

import torch


class Column(Enum):
    """The kinds of model state: the values that are kept for each element of a parameter."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


class Placement(Enum):
    """How the neighbours that share out the state (`Axes.inner_ranks`) hold a column: each the whole, or each a shard.

    The words are those of torch.distributed.tensor.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


def _row(parameter: Placement, gradient: Placement, optimizer: Placement) -> dict[Column, Placement]:
    return {
        Column.PARAMETER: parameter,
        Column.GRADIENT: gradient,
        Column.MASTER: optimizer,
        Column.EXP_AVG: optimizer,
        Column.EXP_AVG_SQ: optimizer,
    }


PLACEMENTS: dict[int, dict[Column, Placement]] = {
    0: _row(Placement.REPLICATED, Placement.REPLICATED, Placement.REPLICATED),
    1: _row(Placement.REPLICATED, Placement.REPLICATED, Placement.SHARDED),
    2: _row(Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: _row(Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}
"""By ZeRO stage. Of a sharded gradient a rank keeps only its own range after a reduction."""


def overwrites_own(zero_stage: int, *, quantized_weights: bool) -> bool:
    """Whether a gather of parameters overwrites the shard that this rank has updated: of whole ones in blocks of
    int8 (--zero-quantized-weights with ZeRO-1 or 2).
    """
    row = placements(zero_stage)
    sharded = row[Column.EXP_AVG] is Placement.SHARDED
    return quantized_weights and sharded and row[Column.PARAMETER] is Placement.REPLICATED


def placements(zero_stage: int) -> dict[Column, Placement]:
    """The row of a stage. Raises ValueError for a stage that is not in the table."""
    if zero_stage not in PLACEMENTS:
        raise ValueError(f"--zero-stage {zero_stage} is not one of {', '.join(map(str, PLACEMENTS))}")
    return PLACEMENTS[zero_stage]


def columns(
    parameter_dtype: torch.dtype, state_dtype: torch.dtype, optimizer: str, *, quantised: bool = False
) -> dict[Column, torch.dtype]:
    """The columns that exist, with their dtypes.

    A master weight exists only where the parameter has a narrower dtype, or is `quantised`: what this rank updates is
    overwritten by what travels. Otherwise the parameter is its own master.
    sgd has no second moment; its momentum is `EXP_AVG`.
    """
    dtypes = {Column.PARAMETER: parameter_dtype, Column.GRADIENT: state_dtype}
    if parameter_dtype != state_dtype or quantised:
        dtypes[Column.MASTER] = state_dtype
    dtypes[Column.EXP_AVG] = state_dtype
    if optimizer != "sgd":
        dtypes[Column.EXP_AVG_SQ] = state_dtype
    return dtypes
