"""Writing ZeRO-1's optimizer files. The vector of each group of a model-parallel rank is cut into dp equal parts.

DeepSpeed pads the vector to a multiple of 2 dp, which aligns the parts for NCCL. The last partition records the
padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.convert.files.safetensors_file import flat_pieces
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter
from megazero.convert.files.unpickle import Record, record_type
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.megatron_deepspeed.folders import zero_file
from megazero.convert.megatron_deepspeed.loss_scale import scaler_state
from megazero.convert.megatron_deepspeed.pieces import rank_pieces
from megazero.convert.megatron_deepspeed.stages import WritePlan, WrittenTensor
from megazero.convert.source import EXP_AVG, EXP_AVG_SQ, MOMENTS, WEIGHT, Source

VERSION = "0.10.0"
"""The version of DeepSpeed whose files have this form. A file has to name one."""
_ADDRESS = record_type("deepspeed.utils.tensor_fragment.fragment_address")


@dataclass(frozen=True)
class FlatGroup:
    """A parameter group as one vector per model-parallel rank. size: elements of a partition."""

    parameters: list[WrittenTensor]
    decays: bool
    size: int
    padding: int


def write_zero(source: Source, inside: Path, planned: WritePlan, options: TargetOptions, advance: Advance) -> None:
    """Write the files of all ranks, stage by stage. The files of a stage's tp and dp ranks are filled side by side, one
    tensor after the other.
    """
    prefix = "bf16_" if source.run.optimizer.precision == "bf16" else ""
    for stage in range(options.pp):
        groups = [_cut(group, options.dp) for group in planned.groups(stage) if group]
        advances = stage == 0 or not planned.layers.tied
        with ExitStack() as opened:
            files = [
                [
                    opened.enter_context(
                        TorchFileWriter(
                            inside / zero_file(d, stage * options.tp + t, prefix),
                            {
                                "optimizer_state_dict": _state(source, planned, groups, d, options.dp),
                                "ds_config": {},
                                "ds_version": VERSION,
                            },
                        )
                    )
                    for d in range(options.dp)
                ]
                for t in range(options.tp)
            ]
            for group, column in _order(len(groups)):
                _fill(source, planned, groups[group], column, files)
        _tell(source, planned, stage, advance, advances)


def _order(groups: int) -> list[tuple[int, str]]:
    """(group, column) in the order of the tensors in a file (`_state`)."""
    return [
        *((group, WEIGHT) for group in range(groups)),
        *((group, column) for group in range(groups) for column in MOMENTS),
    ]


def _tell(source: Source, planned: WritePlan, stage: int, advance: Advance, whole: bool) -> None:
    """Advance by a stage's moments. A tied embedding counts once, although the last stage writes it again."""
    for written in planned.of_stage(stage):
        if whole or written.where.layer != planned.layers.embedding:
            for name in written.names:
                advance(sum(source.entries[name].nbytes(column) for column in MOMENTS))


def _cut(parameters: list[WrittenTensor], dp: int) -> FlatGroup:
    numel = sum(math.prod(written.shape) for written in parameters)
    padding = -numel % (2 * dp)
    return FlatGroup(parameters, parameters[0].decays, (numel + padding) // dp, padding)


def _fill(
    source: Source, planned: WritePlan, group: FlatGroup, column: str, files: Sequence[Sequence[TorchFileWriter]]
) -> None:
    """Write one column of a group into the files of a stage: files[tp rank][dp partition]."""
    dtype = _dtype(source, column)
    at = [0] * len(files)
    for written in group.parameters:
        for name in written.names:
            whole = source.read(name, column)
            for t, pieces in enumerate(rank_pieces(name, whole, len(files), planned.rows)):
                for piece in pieces:
                    for flat in flat_pieces(piece, dtype, name):
                        at[t] = _pour(flat, at[t], group.size, files[t])
    for t, ranks in enumerate(files):
        assert at[t] + group.padding == group.size * len(ranks), (
            f"{at[t]} elements and {group.padding} of padding for {len(ranks)} x {group.size}"
        )
        _pour(torch.zeros(group.padding, dtype=dtype), at[t], group.size, ranks)


def _pour(flat: Tensor, at: int, size: int, files: Sequence[TorchFileWriter]) -> int:
    """Write elements of a vector into its partitions, from position `at` on. Returns the position after them."""
    done = 0
    while done < flat.numel():
        partition, inside = divmod(at + done, size)
        count = min(size - inside, flat.numel() - done)
        files[partition].feed(flat[done : done + count])
        done += count
    return at + done


def _dtype(source: Source, column: str) -> torch.dtype:
    """fp32, as in DeepSpeed's optimizers. An fp64 run keeps fp64."""
    wide = any(entry.columns[column] == torch.float64 for entry in source.entries.values())
    return torch.float64 if wide else torch.float32


def _state(source: Source, planned: WritePlan, groups: Sequence[FlatGroup], d: int, dp: int) -> dict[str, Any]:
    """The state of dp partition d; tensors in the order of `_order`."""
    optimizer, steps = source.run.optimizer, int(source.position.optimizer_steps)
    placeholders = {
        column: [TensorPlaceholder((group.size,), _dtype(source, column)) for group in groups]
        for column in (WEIGHT, *MOMENTS)
    }
    masters = {"single_partition_of_fp32_groups": placeholders[WEIGHT]}
    states = {
        g: {EXP_AVG: placeholders[EXP_AVG][g], EXP_AVG_SQ: placeholders[EXP_AVG_SQ][g], "step": steps}
        for g in range(len(groups))
    }
    described = [
        {
            "lr": source.run.schedule.lr,
            "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
            "eps": optimizer.adam_eps,
            "weight_decay": optimizer.weight_decay if group.decays else 0.0,
            "bias_correction": True,
            "step": steps,
            "params": [g],
        }
        for g, group in enumerate(groups)
    ]
    return {
        **masters,
        "base_optimizer_state": {"state": states, "param_groups": described},
        "clip_grad": optimizer.clip_grad,
        "zero_stage": 1,
        "param_slice_mappings": [_mapping(planned, group, d) for group in groups],
        "group_paddings": [group.padding if d == dp - 1 else 0 for group in groups],
        "partition_count": [dp] * len(groups),
        "ds_version": VERSION,
        **(scaler_state(source) if optimizer.precision != "bf16" else {}),
    }


def _mapping(planned: WritePlan, group: FlatGroup, d: int) -> dict[str, Record]:
    """Parameter -> the part of it in partition d."""
    found = {}
    at, begin, end = 0, d * group.size, (d + 1) * group.size
    for written in group.parameters:
        start, stop = max(at, begin), min(at + math.prod(written.shape), end)
        if start < stop:
            found[planned.parameter(written)] = address = _ADDRESS()
            address.fill({"numel": stop - start, "start": start - begin})
        at += math.prod(written.shape)
    return found
