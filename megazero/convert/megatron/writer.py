"""Writing the torch format of Megatron-LM, for Megatron-core's model with Transformer Engine: weights, a file per tp
rank and stage.

Transformer Engine's `_extra_state` is not written: it is empty without FP8, and Megatron-LM loads without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megazero.config.derive import padded_vocab
from megazero.config.dtypes import PRECISION_OF, compute_dtype
from megazero.config.inventory import TABLES, WORDS, tp_axis
from megazero.convert.files.safetensors_file import flat_pieces
from megazero.convert.files.torch_file_writer import TensorPlaceholder, TorchFileWriter
from megazero.convert.files.unpickle import record_type
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.megatron.folders import FILES, TRACKER, iteration_folder, rank_folder
from megazero.convert.megatron.names import core_name
from megazero.convert.megatron_args import args_of
from megazero.convert.shards import cut_shards
from megazero.convert.source import ConversionError, Source

KeyedNames = tuple[str, tuple[str, ...]]
"""A tensor of Megatron: its key, with layers counted within the stage, and the global names of our tensors that make
its rows, in order.
"""


def write_megatron(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write a folder with Megatron's tracker and one iteration, for tp x pp ranks.

    The vocabulary is padded to a multiple of make_vocab_size_divisible_by x tp. A tied embedding is written on the last
    stage too. Raises ConversionError for a model that Megatron-LM does not have.
    """
    model, precision = source.model, source.run.optimizer.precision
    dtype = options.dtype or compute_dtype(precision)
    if model.num_layers % options.pp:
        raise ConversionError(
            f"--pp {options.pp}: Megatron-LM divides its layers evenly over stages, and the model has "
            f"{model.num_layers}"
        )
    named = args_of(source.run, tp=options.tp, pp=options.pp)
    position = source.position
    args = record_type("argparse.Namespace")()
    args.state = {
        **named,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "iteration": position.iteration,
        "consumed_train_samples": position.consumed_samples,
        "use_mcore_models": True,
        "transformer_impl": "transformer_engine",
        "use_distributed_optimizer": False,
    }
    assert dtype in PRECISION_OF
    word = str(position.iteration) if position.iteration else "release"
    inside = folder / iteration_folder(word)
    for stage in range(options.pp):
        slots = list(_slots(source, stage, options.pp))
        _write_stage(
            source,
            inside,
            options,
            stage,
            slots,
            dtype,
            {"args": args, "checkpoint_version": 3.0, "iteration": position.iteration},
            advance,
        )
    (folder / TRACKER).write_text(f"{word}\n")


def _slots(source: Source, stage: int, stages: int) -> Iterator[KeyedNames]:
    model = source.model
    layers = model.num_layers // stages
    own = range(stage * layers, (stage + 1) * layers)
    names = [name for name in source.entries if _is_here(name, own, stage == 0, stage == stages - 1)]
    found: dict[str, list[str]] = {}
    for name in names:
        key = core_name(name, model).names[0]
        if name.startswith("blocks."):
            number = name.split(".")[1]
            key = key.replace(f"layers.{number}.", f"layers.{int(number) - own.start}.", 1)
        found.setdefault(key, []).append(name)
    if stages > 1 and stage == stages - 1 and not model.untie_embeddings_and_output_weights:
        found["output_layer.weight"] = [WORDS]
    for key, made_of in found.items():
        yield key, tuple(made_of)


def _is_here(name: str, own: range, first: bool, last: bool) -> bool:
    if name.startswith("blocks."):
        return int(name.split(".")[1]) in own
    return first if name.startswith("embedding.") else last


def _write_stage(
    source: Source,
    inside: Path,
    options: TargetOptions,
    stage: int,
    slots: Sequence[KeyedNames],
    dtype: torch.dtype,
    rest: dict[str, object],
    advance: Advance,
) -> None:
    """Write the files of a stage's tp ranks, all at once: each tensor is read once and cut."""
    structure = {
        **rest,
        "model": {key: TensorPlaceholder(_local_shape(source, names, options.tp), dtype) for key, names in slots},
    }
    with ExitStack() as opened:
        files = []
        for rank in range(options.tp):
            path = inside / rank_folder(rank, stage, options.pp) / FILES[0]
            path.parent.mkdir(parents=True)
            files.append(opened.enter_context(TorchFileWriter(path, structure)))
        for _, names in slots:
            for name in names:
                whole = source.read(name)
                for rank, file in enumerate(files):
                    _feed(file, whole, name, _rows(source, name, options.tp), rank, options.tp, dtype)
                advance(source.entries[name].nbytes())


def _feed(file: TorchFileWriter, whole: Tensor, name: str, rows: int, rank: int, tp: int, dtype: torch.dtype) -> None:
    """Write a rank's part of a tensor that has `rows` rows with padding. Padding is zeros. A few million elements are
    converted at a time.
    """
    if rows == whole.shape[0]:
        part, missing = cut_shards(name, whole, tp)[rank], 0
    else:
        own = rows // tp
        part = whole[rank * own : (rank + 1) * own]
        missing = own - part.shape[0]
    for piece in flat_pieces(part, dtype, name) if part.numel() else ():
        file.feed(piece)
    if missing:
        file.feed(torch.zeros(missing, *whole.shape[1:], dtype=dtype))


def _rows(source: Source, name: str, tp: int) -> int:
    return padded_vocab(source.model, tp) if name in TABLES else source.entries[name].shape[0]


def _local_shape(source: Source, names: Sequence[str], tp: int) -> tuple[int, ...]:
    """The shape of a tp rank's part of the tensors, joined on the first axis."""
    first = names[0]
    shape = [sum(_rows(source, name, tp) for name in names), *source.entries[first].shape[1:]]
    axis = tp_axis(first)
    if axis is not None:
        if shape[axis] % tp:
            raise ConversionError(f"--tp {tp}: {first} of shape {list(source.entries[first].shape)} cannot be divided")
        shape[axis] //= tp
    return tuple(shape)
