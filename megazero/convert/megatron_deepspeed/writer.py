"""Writing Megatron-DeepSpeed's checkpoints: weights as layer files, and the optimizer's state if the source has one.

Memory: one global tensor, and a tp rank's part of it. The files of a layer's tp ranks are filled side by side.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.convert.files.safetensors_file import flat_pieces
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter, write_torch_file
from megazero.convert.files.unpickle import record_type
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.megatron_deepspeed.arguments import arguments, universal_info
from megazero.convert.megatron_deepspeed.folders import LATEST, layer_file, rank_file
from megazero.convert.megatron_deepspeed.pieces import rank_pieces
from megazero.convert.megatron_deepspeed.stages import WritePlan, plan
from megazero.convert.megatron_deepspeed.zero_writer import VERSION, write_zero
from megazero.convert.source import MOMENTS, WEIGHT, Source, SourcePosition


def write_megatron_deepspeed(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write `latest` and a folder global_stepN for `options.tp`, `options.pp` and `options.dp` ranks.

    Layer files have `options.dtype`, by default what the model computes in; masters and moments are fp32. Raises
    ConversionError for a model that Megatron-DeepSpeed does not have.
    """
    said = arguments(source.run, source.position, options)
    inside = folder / f"global_step{source.position.iteration}"
    inside.mkdir(parents=True)
    planned = plan(source.model, options)
    dtype = options.dtype or compute_dtype(source.run.optimizer.precision)
    for layer in dict.fromkeys(written.where.layer for written in planned.tensors):
        _write_layer(source, inside, planned, layer, options.tp, dtype, advance)
    for stage in range(options.pp):
        state = model_state(source.run, source.position, planned, stage, options, said)
        for t in range(options.tp):
            write_torch_file(inside / rank_file(stage * options.tp + t), state)
    if all(column in source.columns for column in MOMENTS):
        write_zero(source, inside, planned, options, advance)
    (folder / LATEST).write_text(inside.name)


def _write_layer(
    source: Source, inside: Path, planned: WritePlan, layer: int, tp: int, dtype: torch.dtype, advance: Advance
) -> None:
    tensors = planned.of_layer(layer)
    content = {written.where.key: TensorPlaceholder(written.shape, dtype) for written in tensors}
    with ExitStack() as opened:
        files = [opened.enter_context(TorchFileWriter(inside / layer_file(layer, t), content)) for t in range(tp)]
        for written in tensors:
            for name in written.names:
                whole = source.read(name, WEIGHT)
                for file, pieces in zip(files, rank_pieces(name, whole, tp, planned.rows), strict=True):
                    for piece in pieces:
                        for flat in flat_pieces(piece, dtype, name):
                            file.feed(flat)
                advance(source.entries[name].nbytes())


def model_state(
    run: Run, position: SourcePosition, planned: WritePlan, stage: int, options: TargetOptions, said: dict[str, Any]
) -> dict[str, Any]:
    """The content of an mp_rank file. Where `module` is None, DeepSpeed's pipeline reads the model from the layer
    files.
    """
    args = record_type("argparse.Namespace")()
    args.fill(said)
    shapes = [
        {planned.parameter(written): torch.Size(written.shape) for written in group} for group in planned.groups(stage)
    ]
    return {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [group for group in shapes if group],
        "frozen_param_shapes": None,
        "shared_params": {},
        "lr_scheduler": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": max(0, position.iteration - int(position.optimizer_steps)),
        "global_steps": position.iteration,
        "global_samples": position.consumed_samples,
        "dp_world_size": options.dp,
        "mp_world_size": options.tp * options.pp,
        "ds_config": {},
        "ds_version": VERSION,
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": position.iteration,
        "tokens": position.consumed_tokens,
        "universal_checkpoint_info": universal_info(planned),
    }
