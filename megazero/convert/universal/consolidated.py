"""Reading and writing consolidated weights: one state dictionary under Megatron-DeepSpeed's names, as DeepSpeed's
zero_to_fp32 writes it.

The facts about the model that tensors do not show come from megatron_args.json in the same folder, or else from an
mp_rank file of the checkpoint that was consolidated: zero_to_fp32 writes its file into that checkpoint's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.convert.files.safetensors_file import TensorHeader, flat_pieces, write_safetensors
from megazero.convert.files.torch_file import read_torch_file
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.hf.config import read_json
from megazero.convert.hf.files import stored_tensors, weight_files
from megazero.convert.megatron.source import args_of, note_padding
from megazero.convert.megatron_args import model_from_args, run_from_args
from megazero.convert.megatron_deepspeed.folders import KNOWN
from megazero.convert.megatron_deepspeed.schedule import with_schedule
from megazero.convert.report import ConversionReport
from megazero.convert.source import WEIGHT, ConversionError, Source, SourcePosition, parameter_specs
from megazero.convert.tracker import named_folder
from megazero.convert.universal.folders import model_states
from megazero.convert.universal.names import written_names
from megazero.convert.universal.whole_tensors import WholeTensor, WholeTensors, WholeTensorSource, precision_of
from megazero.convert.universal.writer import run_args

TORCH_FILE, SAFETENSORS_FILE, ARGS_FILE = "pytorch_model.bin", "model.safetensors", "megatron_args.json"


def recognises(path: Path) -> bool:
    """Whether a folder has weights without a Hugging Face config.json, and a file with the model's arguments."""
    if (path / "config.json").is_file():
        return False
    try:
        return bool(weight_files(path)) and _told_by(path) is not None
    except ConversionError:
        return True


def _told_by(path: Path) -> Path | None:
    """The file with the model's arguments."""
    if (path / ARGS_FILE).is_file():
        return path / ARGS_FILE
    latest = path / "latest"
    folders = [path, *([named_folder(latest)] if latest.is_file() else [])]
    return next((found for folder in folders if (found := model_states(folder)) is not None), None)


def open_consolidated(path: Path) -> Source:
    """Open the state dictionary in this folder. Raises ConversionError."""
    told, report = _told_by(path), ConversionReport()
    if told is None:
        raise ConversionError(
            f"{path} has neither {ARGS_FILE} nor an mp_rank_*_model_states.pt: nothing tells the model's shape"
        )
    said = _args(told)
    closing = ExitStack()
    stored = stored_tensors(path, closing)
    numbers = {
        name: tensor for name, tensor in stored.items() if tensor.dtype is not None and tensor.dtype.is_floating_point
    }
    report.unused |= {name: f"of type {tensor.code}" for name, tensor in stored.items() if name not in numbers}
    parameters = {
        name: WholeTensor(tensor.shape, tensor.dtype or torch.float32, partial(_weight, tensor.read))
        for name, tensor in numbers.items()
    }
    held = WholeTensors(str(path), parameters, report)
    args = held.completed(said)
    model = model_from_args(args, str(path))
    note_padding(report, args, model)
    held.take(model, 1)
    report.notes.append("weights only: a state dictionary has no optimizer state")
    entries = {
        name: TensorInfo(spec.shape, {WEIGHT: held.parameter(name).dtype})
        for name, spec in parameter_specs(model).items()
    }
    iteration, samples = (int(args.get(name) or 0) for name in ("iteration", "consumed_train_samples"))
    position = SourcePosition(
        iteration, samples, int(args.get("consumed_train_tokens") or samples * model.seq_length), float(iteration)
    )
    source = WholeTensorSource(
        "consolidated",
        path,
        with_schedule(run_from_args(args, model, precision_of(args)), args),
        position,
        held,
        entries,
    )
    source.closing = closing
    return source


def _weight(read: Callable[[], Tensor], column: str) -> Tensor:
    assert column == WEIGHT, "a state dictionary has weights alone"
    return read()


def _args(told: Path) -> Mapping[str, Any]:
    if told.name != ARGS_FILE:
        return args_of(told.parent, read_torch_file(told, KNOWN))
    return read_json(told)


def write_torch(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write pytorch_model.bin, in fp32 or `options.dtype`.

    Raises ConversionError for what Megatron-DeepSpeed does not have.
    """
    args = run_args(source, options.dtype)
    slots = _slots(source, options)
    with TorchFileWriter(
        folder / TORCH_FILE, {slot.key: TensorPlaceholder(slot.shape, slot.dtype) for slot in slots}
    ) as file:
        for slot, made_of in zip(slots, written_names(source.model).values(), strict=True):
            for value in _read(source, made_of, advance):
                for piece in flat_pieces(value, slot.dtype, slot.key):
                    file.feed(piece)
    _write_args(args, folder)


def write_state_safetensors(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """The same as model.safetensors."""
    args = run_args(source, options.dtype)
    slots = _slots(source, options)
    tensors = (_joined(source, made_of, advance) for made_of in written_names(source.model).values())
    write_safetensors(folder / SAFETENSORS_FILE, slots, tensors, {"format": "pt"})
    _write_args(args, folder)


def _slots(source: Source, options: TargetOptions) -> list[TensorHeader]:
    dtype = options.dtype or torch.float32
    found = []
    for key, made_of in written_names(source.model).items():
        rows = sum(source.entries[name].shape[0] for name in made_of)
        found.append(TensorHeader(key, dtype, (rows, *source.entries[made_of[0]].shape[1:])))
    return found


def _read(source: Source, made_of: Sequence[str], advance: Advance) -> Iterator[Tensor]:
    for name in made_of:
        yield source.read(name)
        advance(source.entries[name].nbytes())


def _joined(source: Source, made_of: Sequence[str], advance: Advance) -> Tensor:
    values = list(_read(source, made_of, advance))
    return values[0] if len(values) == 1 else torch.cat(values)


def _write_args(args: Mapping[str, Any], folder: Path) -> None:
    (folder / ARGS_FILE).write_text(json.dumps(args, indent=2) + "\n")
