"""The optimizer's state in Megatron's torch format: masters and moments under numbers, which need names.

Megatron sorts the parameters of a rank's chunks into groups with and without weight decay, in the order of its modules,
and numbers them. The state dictionary has the same order. Nothing in the file says which number is which parameter. But
a 16-bit parameter is its rounded fp32 master: where this holds for every tensor, bit for bit, the order is certain.
Where it does not hold, no state is carried over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.convert.megatron.assembly import Ranks
from megazero.convert.megatron.chunks import Chunk, in_model_order, numbered
from megazero.convert.megatron.names import why_ignored
from megazero.convert.source import MOMENTS, WEIGHT

_SIXTEEN = (torch.bfloat16, torch.float16)
_COMPARED = 4096
"""Elements of each tensor that are compared with its master."""


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state of all ranks.

    columns  "weight" (masters) and the moments, per tp rank by the model's keys; empty where their order is unclear
    why_not  the reason, where it is
    steps    Adam's step count
    """

    columns: Mapping[str, Ranks] = field(default_factory=dict)
    steps: float = 0.0
    why_not: str | None = None


class _Unclear(Exception):
    """The files do not show which number belongs to which parameter."""


def optimizer_state(
    states: Mapping[tuple[int, int], Mapping[str, Any]],
    chunks: Mapping[tuple[int, int], list[Chunk]],
    tp: int,
    pp: int,
    folder: Path,
) -> OptimizerState:
    """The state of all ranks, (tp rank, stage) -> file; or the reason why there is none."""
    beside = [path for name in ("distrib_optim.pt", "optim.pt") for path in folder.glob(f"mp_rank_*/{name}")]
    if beside:
        return OptimizerState(
            why_not=f"it is a distributed optimizer's ({beside[0].name}), whose buffers say nothing of their parameters"
        )
    if not any("optimizer" in state for state in states.values()):
        return OptimizerState()
    named = {}
    try:
        for rank, state in states.items():
            named[rank] = _named(state, chunks[rank])
    except _Unclear as unclear:
        return OptimizerState(why_not=str(unclear))
    steps = {found.steps for found in named.values()}
    if len(steps) > 1:
        return OptimizerState(why_not=f"ranks have counted {', '.join(map(str, sorted(steps)))} steps")
    columns = {
        column: [numbered(in_model_order([named[t, p].columns[column] for p in range(pp)])) for t in range(tp)]
        for column in (WEIGHT, *MOMENTS)
    }
    return OptimizerState(columns, steps.pop())


@dataclass(frozen=True)
class _Named:
    """The state of one rank, for each column and chunk by the model's keys."""

    columns: Mapping[str, list[Chunk]]
    steps: float


def _named(state: Mapping[str, Any], chunks: list[Chunk]) -> _Named:
    optimizer = state.get("optimizer")
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if not isinstance(optimizer, dict) or "fp32_from_fp16_params" not in optimizer:
        raise _Unclear("without fp32 masters nothing shows which of its numbers is which parameter")
    inner, masters = optimizer["optimizer"], optimizer["fp32_from_fp16_params"]
    groups = inner["param_groups"]
    if len(masters) != len(groups):
        raise _Unclear(f"it has {len(groups)} groups of parameters and masters for {len(masters)}")
    columns: dict[str, list[Chunk]] = {column: [{} for _ in chunks] for column in (WEIGHT, *MOMENTS)}
    for group, master in zip(groups, masters, strict=True):
        members = list(_members(chunks, decays=_decays(group)))
        if len(members) != len(group["params"]):
            raise _Unclear(
                f"a group of it has {len(group['params'])} parameters where the model has {len(members)} of that kind"
            )
        waiting = iter(master)
        for number, (chunk, key) in zip(group["params"], members, strict=True):
            model = chunks[chunk][key]
            own = next(waiting, None) if model.dtype in _SIXTEEN else model
            values = {WEIGHT: own, **{moment: inner["state"].get(number, {}).get(moment) for moment in MOMENTS}}
            _agree(key, model, values)
            for column, value in values.items():
                columns[column][chunk][key] = value
    left = sum(len(chunk) for chunk in columns[WEIGHT])
    if left != sum(1 for chunk in chunks for key in chunk if why_ignored(key) is None):
        raise _Unclear("its groups do not cover every parameter once")
    return _Named(columns, _steps(inner))


def _members(chunks: list[Chunk], *, decays: bool) -> Iterator[tuple[int, str]]:
    """(chunk, key) of the parameters with weight decay, or of those without: vectors and biases have none."""
    for index, chunk in enumerate(chunks):
        for key, value in chunk.items():
            if why_ignored(key) is None and (value.dim() > 1 and not key.endswith(".bias")) == decays:
                yield index, key


def _decays(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", group.get("weight_decay", 1.0)))


def _agree(key: str, model: Tensor, values: Mapping[str, Any]) -> None:
    for column, value in values.items():
        if not isinstance(value, Tensor) or value.shape != model.shape:
            raise _Unclear(f"its {column} for {key} is missing or of another shape")
    master = values[WEIGHT].reshape(-1)[:_COMPARED]
    if not torch.equal(master.to(model.dtype), model.reshape(-1)[:_COMPARED]):
        raise _Unclear(f"the master that should be {key}'s is not, rounded, what the model has")


def _steps(inner: Mapping[str, Any]) -> float:
    """Adam's step count. apex and Transformer Engine keep it in the group, torch with each parameter."""
    counts = [group["step"] for group in inner["param_groups"] if group.get("step") is not None]
    counts += [state["step"] for state in inner["state"].values() if "step" in state]
    return max((float(count) for count in counts), default=0.0)
