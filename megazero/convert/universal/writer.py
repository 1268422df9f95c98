"""Writing universal checkpoints, as DeepSpeed's ds_to_universal makes them, under BLOOM's parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.inventory import TABLES, tp_axis
from megazero.config.schema import OptimizerConfig
from megazero.convert.files.safetensors_file import flat_pieces
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter, write_torch_file
from megazero.convert.files.unpickle import Record, record_type
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.megatron_deepspeed.arguments import arguments
from megazero.convert.megatron_deepspeed.loss_scale import scaler_state
from megazero.convert.source import Source
from megazero.convert.universal.folders import LATEST, MODEL_STATES, OPTIMIZER, STATES, STEP, ZERO
from megazero.convert.universal.names import written_names

DS_VERSION = "0.19.8"
"""The DeepSpeed whose reading of these files is tested. It refuses files that name none."""
UNIVERSAL_VERSION = 0.2
"""The format version that the parameters' dictionaries below need, because they have sub-parameters.

From 0.4 on, shard widths are expected where shapes are uneven.
"""


def write_universal(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write global_stepN_universal and latest_universal: weights in fp32, moments if the source has them, the true
    vocabulary.

    `options.dtype` is what the model is said to compute in; the values stay fp32.
    Raises ConversionError for what Megatron-DeepSpeed does not have.
    """
    args = run_args(source, options.dtype)
    inside = folder / f"global_step{source.position.iteration}_universal"
    (inside / ZERO).mkdir(parents=True)
    columns = source.columns
    _note(source)
    for key, made_of in written_names(source.model).items():
        there = inside / ZERO / key
        there.mkdir()
        for column in columns:
            with TorchFileWriter(there / STATES[column], _parameter(source, made_of)) as file:
                for value in _values(source, made_of, column, advance):
                    file.feed(value)
        if len(columns) > 1:
            write_torch_file(there / STEP, torch.tensor(float(source.position.optimizer_steps)))
    write_torch_file(inside / ZERO / OPTIMIZER, _optimizer_state(source))
    write_torch_file(inside / MODEL_STATES, _model_states(source, args))
    (folder / LATEST).write_text(inside.name)


def run_args(source: Source, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Megatron-DeepSpeed's arguments for the source's run. Raises ConversionError for a model that it does not have."""
    found = arguments(source.run, source.position, TargetOptions())
    found["padded_vocab_size"] = source.model.vocab_size
    if dtype is not None:
        found |= {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    return found


def _parameter(source: Source, made_of: Sequence[str]) -> dict[str, Any]:
    """The content of a parameter's file. A replicated parameter has no axis to cut."""
    first = made_of[0]
    rows = sum(source.entries[name].shape[0] for name in made_of)
    content: dict[str, Any] = {"param": TensorPlaceholder((rows, *source.entries[first].shape[1:]), torch.float32)}
    axis = tp_axis(first)
    if axis is not None:
        content["cat_dim"] = axis
    if len(made_of) > 1:
        content["param_n_sub_params"] = len(made_of)
    if first in TABLES:
        content["vocab_tensor"] = True
    return content


def _values(source: Source, made_of: Sequence[str], column: str, advance: Advance) -> Iterator[Tensor]:
    """The values in order, a few million elements at a time."""
    for name in made_of:
        yield from flat_pieces(source.read(name, column), torch.float32, f"{column} of {name}")
        advance(source.entries[name].nbytes(column))


def _note(source: Source) -> None:
    wide = sorted(
        {str(entry.columns[column]) for entry in source.entries.values() for column in source.columns}
        - {str(torch.float32)}
    )
    if str(torch.float64) in wide:
        source.report.notes.append("float64 values are rounded to float32, the only dtype that this format has")


def _optimizer_state(source: Source) -> dict[str, Any]:
    """The part of the optimizer's state that belongs to no parameter: two groups as Megatron makes them, with and
    without weight decay.
    """
    optimizer = source.run.optimizer
    state: dict[str, Any] = {
        "ds_version": DS_VERSION,
        "zero_stage": 1,
        "overflow": False,
        "clip_grad": optimizer.clip_grad,
    }
    if source.position.loss_scale:
        state |= scaler_state(source)
    state["param_groups"] = [
        _group(optimizer, source, number, decay) for number, decay in enumerate((optimizer.weight_decay, 0.0))
    ]
    return state


def _group(optimizer: OptimizerConfig, source: Source, number: int, decay: float) -> dict[str, Any]:
    return {
        "lr": source.run.schedule.lr,
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "weight_decay": decay,
        "step": int(source.position.optimizer_steps),
        "params": [number],
    }


def _model_states(source: Source, args: dict[str, Any]) -> dict[str, Any]:
    """The content of the mp_rank file that DeepSpeed's engine and Megatron-DeepSpeed need. It holds no weights."""
    position = source.position
    return {
        "module": None,
        "args": namespace(args),
        "checkpoint_version": 3.0,
        "iteration": position.iteration,
        "tokens": position.consumed_tokens,
        "global_steps": position.iteration,
        "global_samples": position.consumed_samples,
        "skipped_steps": max(0, position.iteration - int(position.optimizer_steps)),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DS_VERSION,
        "universal_checkpoint_info": {
            "universal_checkpoint_version": UNIVERSAL_VERSION,
            "original_vocab_size": source.model.vocab_size,
            **_patterns(source),
        },
    }


def _patterns(source: Source) -> dict[str, list[str]]:
    """Regular expressions of the parameters that are treated alike."""
    names = written_names(source.model)
    escaped = {key: key.replace(".", r"\.") + "$" for key in names}
    kinds = {key: tp_axis(made_of[0]) for key, made_of in names.items()}
    return {
        "vocabulary_parameter_patterns": [escaped[key] for key, made_of in names.items() if made_of[0] in TABLES],
        "tp_replicated_parameter_patterns": [escaped[key] for key, axis in kinds.items() if axis is None],
        "parameter_with_row_parallelism_patterns": [escaped[key] for key, axis in kinds.items() if axis == 1],
        "parameter_with_2_sub_params_cat_dim_0": [escaped[key] for key, made_of in names.items() if len(made_of) == 2],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight$"],
    }


def namespace(args: dict[str, Any]) -> Record:
    """The arguments as the object that Megatron stores."""
    made = record_type("argparse.Namespace")()
    made.state = dict(args)
    return made
