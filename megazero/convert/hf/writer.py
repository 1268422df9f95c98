"""Writing a source as a Hugging Face folder: tensors as a stream into shards, config.json, and the companions."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.dtypes import compute_dtype
from megazero.convert.companions import copyable
from megazero.convert.files.safetensors_file import TensorHeader, divided, write_safetensors
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.hf.config import (
    CONFIG,
    GENERATION,
    family_for,
    generation_config,
    kept_config,
    new_config,
    original_config,
    read_json,
    write_json,
)
from megazero.convert.hf.files import INDEX, SINGLE
from megazero.convert.hf.rules import Names, their_shapes
from megazero.convert.hf.tables import Family
from megazero.convert.hf.tokenizer_files import write_tokenizer
from megazero.convert.source import ConversionError, Source
from megazero.convert.tokenizers import end_of_turn, missing_tokenizer

SHARD_BYTES = 5_000_000_000
"""The most bytes that transformers writes into one file."""
_METADATA = {"format": "pt"}


def write_hf(
    source: Source, folder: Path, options: TargetOptions, advance: Advance, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder that `from_pretrained` opens. Weights only; one tensor is in memory at a time.

    shard_bytes: a file is closed before it would hold more; a tensor that is larger has one to itself. Raises
    ConversionError, before anything is written, where no family computes what the model does, and where a weight is too
    large for the dtype.
    """
    if (missing := missing_tokenizer(source)) and not options.without_tokenizer:
        raise ConversionError(f"{missing}, which is not there; --without-tokenizer writes the model alone")
    dtype = options.dtype or compute_dtype(source.run.optimizer.precision)
    kept = copyable(source.companions, source.report.notes.append)
    original = original_config(kept)
    family = family_for(source.model, None if original is None else original.get("model_type"))
    lost = [problem for need in family.unsaid for problem in need.problems(source.model)]
    source.report.notes += [f"{CONFIG} of a {family.model_type} model has no key for it: {problem}" for problem in lost]
    slots = _slots(source, family.names, dtype)
    shards = divided(slots, shard_bytes, SINGLE)
    tensors = _tensors(source, family.names, advance)
    for name, shard in shards.items():
        write_safetensors(folder / name, shard, itertools.islice(tensors, len(shard)), _METADATA)
    surplus = next(tensors, None)  # reports the last tensor as read
    assert surplus is None, "every tensor has its slot"
    if len(shards) > 1:
        weight_map = {slot.key: name for name, shard in shards.items() for slot in shard}
        sizes = {"total_size": sum(slot.nbytes for slot in slots)}
        write_json(folder / INDEX, {"metadata": sizes, "weight_map": weight_map})
    made = _write_configs(source, kept, folder, family, original, dtype)
    _carry(kept, folder)
    write_tokenizer(source, folder, made)


def _slots(source: Source, names: Names, dtype: torch.dtype) -> list[TensorHeader]:
    """The tensors to write, in the order in which ours are read."""
    found = []
    for name, entry in source.entries.items():
        rule = names.rule(name)
        if rule.joined and name != rule.joined[0]:
            continue  # the first of them writes all
        shapes = their_shapes(rule, source.model, entry.shape)
        found += [TensorHeader(key, dtype, shape) for key, shape in zip(names.written(rule), shapes, strict=True)]
    return found


def _tensors(source: Source, names: Names, advance: Advance) -> Iterator[Tensor]:
    for name, entry in source.entries.items():
        rule = names.rule(name)
        if not rule.joined:
            yield from rule.how.theirs(source.model, source.read(name))
        elif name == rule.joined[0]:
            yield torch.cat([source.read(part) for part in rule.joined])
        advance(entry.nbytes())


def _write_configs(
    source: Source,
    kept: Mapping[str, Path],
    folder: Path,
    family: Family,
    original: dict[str, Any] | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write config.json and generation_config.json. Returns the former."""
    if original is not None and original.get("model_type") == family.model_type:
        made = kept_config(original, kept[CONFIG], family, source.run, dtype)
    else:
        made, original = new_config(family, source.run, dtype), None
    write_json(folder / CONFIG, made)
    generation = kept.get(GENERATION)
    if generation is None:
        write_json(folder / GENERATION, generation_config(made, end_of_turn(source)))
    elif original is not None and original.get("eos_token_id") == made.get("eos_token_id"):
        shutil.copyfile(generation, folder / GENERATION)
    else:
        write_json(folder / GENERATION, read_json(generation) | {"eos_token_id": made.get("eos_token_id")})
    return made


def _carry(kept: Mapping[str, Path], folder: Path) -> None:
    for name, path in kept.items():
        if name not in (CONFIG, GENERATION):
            shutil.copyfile(path, folder / name)
