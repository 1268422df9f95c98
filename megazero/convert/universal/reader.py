"""Reading universal checkpoints, those of DeepSpeed's own ds_to_universal included.

A parameter's file holds {"param": the whole tensor, "cat_dim": axis that tp ranks divide, ...}. "vocab_tensor" says
that the vocabulary's padding was cut off; BLOOM's older ones keep it. "param_n_sub_params" says that a gated layer's
[gate; up] were joined one by one; without it tp ranks' rows follow each other, each rank's gate before its other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.convert.megatron.source import args_of, note_padding
from megazero.convert.megatron_args import model_from_args, run_from_args
from megazero.convert.megatron_deepspeed.folders import Files
from megazero.convert.megatron_deepspeed.loss_scale import loss_scale_of, with_loss_scale
from megazero.convert.megatron_deepspeed.schedule import with_schedule
from megazero.convert.report import ConversionReport
from megazero.convert.source import MOMENTS, WEIGHT, ConversionError, Source, SourcePosition, parameter_specs
from megazero.convert.universal.folders import (
    OPTIMIZER,
    STATES,
    STEP,
    ZERO,
    checkpoint_folder,
    model_states,
    parameters,
)
from megazero.convert.universal.whole_tensors import WholeTensor, WholeTensors, WholeTensorSource, precision_of

_PARAM = "param"


def open_universal(path: Path) -> Source:
    """The checkpoint in this folder, or the one that `latest_universal` names; its column "weight" is the fp32 master.

    Raises ConversionError.
    """
    folder = checkpoint_folder(path)
    files, report = Files(), ConversionReport()
    states = model_states(folder)
    state = files[states] if states is not None else None
    if not isinstance(state, dict):
        raise ConversionError(
            f"{folder} has no mp_rank_*_model_states.pt with a dictionary, whose arguments tell the model's shape"
        )
    folders = parameters(folder)
    held = WholeTensors(str(folder), {name: _parameter(files, inside) for name, inside in folders.items()}, report)
    args = held.completed(args_of(folder, state))
    model = model_from_args(args, str(folder))
    note_padding(report, args, model)
    held.take(model, int(args.get("tensor_model_parallel_size") or 1))
    columns = (WEIGHT, *MOMENTS) if _has_moments(held, folders) else (WEIGHT,)
    dtypes = {column: {name: _dtype(held, name, column) for name in held.theirs} for column in columns}
    entries = {
        name: TensorInfo(spec.shape, {column: dtypes[column][name] for column in columns})
        for name, spec in parameter_specs(model).items()
    }
    known = _optimizer(folder, files, report) | {name: value for name, value in args.items() if value is not None}
    run = with_schedule(run_from_args(known, model, precision_of(args)), args)
    run = with_loss_scale(run, _optimizer_state(folder, files).get("loss_scaler"))
    position = _position(folder, files, args, state, folders, report)
    source = WholeTensorSource("universal", folder, run, position, held, entries)
    source.closing.callback(files.close)
    return source


def _parameter(files: Files, folder: Path) -> WholeTensor:
    content = _content(files, folder, WEIGHT)
    value = content[_PARAM]
    return WholeTensor(
        tuple(value.shape),
        value.dtype,
        partial(_value, files, folder),
        {k: v for k, v in content.items() if k != _PARAM},
    )


def _value(files: Files, folder: Path, column: str) -> Tensor:
    value: Tensor = _content(files, folder, column)[_PARAM]
    return value


def _content(files: Files, folder: Path, column: str) -> Mapping[str, Any]:
    path = folder / STATES[column]
    content = files[path]
    if isinstance(content, Tensor):
        raise ConversionError(
            f"{path} holds a flat tensor without a shape, as ZeRO stage 3 leaves it: this is not read"
        )
    if not isinstance(content, dict) or not isinstance(content.get(_PARAM), Tensor):
        raise ConversionError(f"{path} holds no tensor {_PARAM!r}")
    return content


def _dtype(held: WholeTensors, name: str, column: str) -> Any:
    parameter = held.parameter(name)
    return parameter.dtype if column == WEIGHT else parameter.read(column).dtype


def _has_moments(held: WholeTensors, folders: Mapping[str, Path]) -> bool:
    """Whether every parameter of the model has both moments."""
    without = [
        name for name in held.report.mapped if not all((folders[name] / STATES[moment]).is_file() for moment in MOMENTS)
    ]
    if without:
        held.report.notes.append(
            f"{len(without)} parameters have no exp_avg.pt or exp_avg_sq.pt ({without[0]}, ...): weights only"
        )
    return not without


def _optimizer(folder: Path, files: Files, report: ConversionReport) -> dict[str, Any]:
    """The optimizer's settings, under the names of the arguments."""
    state = _optimizer_state(folder, files)
    report.unused |= {
        f"{OPTIMIZER} {key}": "DeepSpeed's own bookkeeping"
        for key in state
        if key not in ("param_groups", "clip_grad", "loss_scaler")
    }
    groups = [group for group in state.get("param_groups") or [] if isinstance(group, dict)]
    first: Mapping[str, Any] = groups[0] if groups else {}
    betas = first.get("betas") or (None, None)
    found = {
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_eps": first.get("eps"),
        "weight_decay": max((group.get("weight_decay") or 0.0 for group in groups), default=None),
        "clip_grad": state.get("clip_grad"),
        "lr": first.get("lr"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _optimizer_state(folder: Path, files: Files) -> Mapping[str, Any]:
    path = folder / ZERO / OPTIMIZER
    return files[path] if path.is_file() else {}


def _position(
    folder: Path,
    files: Files,
    args: Mapping[str, Any],
    state: Mapping[str, Any],
    folders: Mapping[str, Path],
    report: ConversionReport,
) -> SourcePosition:
    iteration = int(state.get("iteration") or args.get("iteration") or state.get("global_steps") or 0)
    samples = int(args.get("consumed_train_samples") or state.get("global_samples") or 0)
    tokens = int(state.get("tokens") or args.get("consumed_train_tokens") or 0)
    optimizer = _optimizer_state(folder, files)
    steps = _steps(optimizer, files, folders, report) or float(iteration)
    return SourcePosition(
        iteration,
        samples,
        tokens or samples * int(args["seq_length"]),
        steps,
        loss_scale_of(optimizer.get("loss_scaler")),
    )


def _steps(optimizer: Mapping[str, Any], files: Files, folders: Mapping[str, Path], report: ConversionReport) -> float:
    """Adam's step count, which is stored with each parameter or with the optimizer's groups."""
    counted = {name: float(files[inside / STEP]) for name, inside in folders.items() if (inside / STEP).is_file()}
    if counted:
        usual, _ = Counter(counted.values()).most_common(1)[0]
        others = {name: count for name, count in counted.items() if count != usual}
        if others:
            name, count = next(iter(others.items()))
            report.apart.append(
                f"{STEP} is {count:g} of {name} ({len(others)} such), {usual:g} of the others, which is taken for all"
            )
        return usual
    groups = optimizer.get("param_groups") or []
    return max(
        (float(group["step"]) for group in groups if isinstance(group, dict) and group.get("step") is not None),
        default=0.0,
    )
