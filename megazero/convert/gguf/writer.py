"""Writing a source as one GGUF file: metadata, the tokenizer, and tensors as a stream."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.narrowing import narrowed
from megazero.config.derive import max_positions
from megazero.config.dtypes import compute_dtype
from megazero.convert.changed import Reaching
from megazero.convert.companions import copyable
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.gguf.architectures import ARCHITECTURES, COMMON, Architecture
from megazero.convert.gguf.rope import divisors, scaling_metadata
from megazero.convert.gguf.vocabulary import usage_in, vocabulary_in
from megazero.convert.hf.config import CONFIG, family_for, original_config, read_config
from megazero.convert.hf.rules import Names, Rule, their_shapes
from megazero.convert.hf.tables import Family
from megazero.convert.hf.tokenizer_files import write_tokenizer
from megazero.convert.source import ConversionError, Source
from megazero.convert.tokenizers import end_of_turn, missing_tokenizer

FILE = "model.gguf"
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
"""Type of matrices -> name of the file's type in `gguf.LlamaFileType`."""
_BLOCK, _BLOCK_BYTES, _LARGEST = 32, 34, 127
"""Of Q8_0: values with a scale in common, their bytes, and the largest integer."""


def write_gguf(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """Write model.gguf, which llama.cpp opens. Weights only; one tensor is in memory at a time.

    Vectors and learned positions are F32, as llama.cpp computes with them. Raises ConversionError, before anything is
    written, where llama.cpp does not compute what the model does, or has no such tokenizer.
    """
    gguf = _package()
    if (missing := missing_tokenizer(source)) and not options.without_tokenizer:
        raise ConversionError(f"{missing}, which is not there; --without-tokenizer writes the model alone")
    family, source = _family_and_reach(source)
    architecture = _architecture(family, source)
    kind = _kind(source, options)
    slots = [*_slots(source, family.names, architecture, kind, gguf), *_divisor_slots(source)]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, architecture.name)])
    writer.add_name(source.path.name)
    writer.add_file_type(getattr(gguf.LlamaFileType, _FILE_TYPES[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in {**COMMON, **architecture.metadata}.items():
        getattr(writer, f"add_{name}")(value(source.model))
    for name, value in scaling_metadata(source.model).items():
        getattr(writer, f"add_{name}")(gguf.RopeScalingType(value) if name == "rope_scaling_type" else value)
    _add_tokenizer(writer, source, options)
    for slot in slots:
        raw = getattr(gguf.GGMLQuantizationType, slot.kind)
        writer.add_tensor_info(slot.name, slot.shape, np.dtype(np.float32), slot.nbytes, raw)
    writer.write_header_to_file(folder / FILE)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    tensors = chain(_tensors(source, family.names, architecture, advance), divisors(source.model).values())
    for slot, tensor in zip(slots, tensors, strict=True):
        writer.write_tensor_data(_stored(tensor, slot, gguf))
    writer.close()


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its name, the shape [out, in], and its type there."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        count = int(np.prod(self.shape))
        if self.kind == "Q8_0":
            return count // _BLOCK * _BLOCK_BYTES
        return count * (4 if self.kind == "F32" else 2)


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConversionError(
            "--to gguf needs the package gguf, which is not installed: pip install 'megazero[gguf]'"
        ) from error
    return gguf


def _family_and_reach(source: Source) -> tuple[Family, Source]:
    """The family, and the source with the context of the config.json that it came with, where training took shorter
    samples: config.json of --to hf has that context, too. A shorter one stays where only then no window hides anything.
    """
    kept = copyable(source.companions, source.report.notes.append)
    original, model = original_config(kept), source.model
    family = family_for(model, None if original is None else original.get("model_type"))
    if original is None or original.get("model_type") != family.model_type or model.position_embedding == "learned":
        return family, source
    before, known = max_positions(read_config(original, kept[CONFIG])), ARCHITECTURES.get(family.model_type)
    if known is None or before <= max_positions(model):
        return family, source
    longer = Reaching(source, before)
    hides = any(problem for need in known.needs for problem in need.problems(longer.model))
    return family, source if hides else longer


def _architecture(family: Family, source: Source) -> Architecture:
    known = ARCHITECTURES.get(family.model_type)
    if known is None:
        raise ConversionError(
            f"--to gguf: llama.cpp does not compute models of the family {family.model_type}, or megazero has no row "
            f"for it; known are {', '.join(ARCHITECTURES)}"
        )
    problems = [problem for need in known.needs for problem in need.problems(source.model)]
    if problems:
        raise ConversionError(f"--to gguf: llama.cpp's {family.model_type} is another model: {'; '.join(problems)}")
    nearly = [problem for need in known.nearly for problem in need.problems(source.model)]
    source.report.notes += [f"llama.cpp computes nearly the same: {problem}" for problem in nearly]
    return known


def _kind(source: Source, options: TargetOptions) -> str:
    """The type of matrices."""
    if options.quantized is not None:
        return options.quantized.upper()
    dtype = options.dtype or compute_dtype(source.run.optimizer.precision)
    if dtype not in _TYPES:
        raise ConversionError(f"--to gguf: llama.cpp computes with nothing as wide as {dtype}; nearest: --dtype fp32")
    return _TYPES[dtype]


def _slots(source: Source, names: Names, architecture: Architecture, kind: str, gguf: Any) -> Iterator[GgufTensor]:
    """The tensors to write, in the order in which ours are read."""
    arch = getattr(gguf.MODEL_ARCH, architecture.name)
    their_names = gguf.get_tensor_name_map(arch, source.model.num_layers)
    for name, entry in source.entries.items():
        rule = names.rule(name)
        if rule.joined and name != rule.joined[0]:
            continue  # the first of them writes all
        shapes = their_shapes(rule, source.model, entry.shape)
        for key, shape in zip(names.written(rule), shapes, strict=True):
            stored = their_names.get_name(key.removeprefix(architecture.prefix), try_suffixes=(".weight", ".bias"))
            if stored is None:
                raise ConversionError(f"--to gguf: llama.cpp has no tensor for {key} in a model like this")
            laid_out = architecture.laid_out(key, source.model, torch.empty(shape, device="meta"))
            yield GgufTensor(stored, tuple(laid_out.shape), _kind_of(stored, tuple(laid_out.shape), kind))


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or name.startswith("position_embd"):
        return "F32"
    if kind == "Q8_0" and shape[-1] % _BLOCK:  # rows are no whole blocks; llama.cpp's own program does the same
        return "F16"
    return kind


def _tensors(source: Source, names: Names, architecture: Architecture, advance: Advance) -> Iterator[Tensor]:
    for name, entry in source.entries.items():
        rule = names.rule(name)
        for key, tensor in zip(names.written(rule), _theirs(source, name, rule), strict=False):
            yield architecture.laid_out(key, source.model, tensor)
        advance(entry.nbytes())


def _theirs(source: Source, name: str, rule: Rule) -> list[Tensor]:
    """The tensors of a rule; none where several of ours make one and `name` is not the first of them."""
    if not rule.joined:
        return rule.how.theirs(source.model, source.read(name))
    return [torch.cat([source.read(part) for part in rule.joined])] if name == rule.joined[0] else []


def _divisor_slots(source: Source) -> list[GgufTensor]:
    return [GgufTensor(name, tuple(tensor.shape), "F32") for name, tensor in divisors(source.model).items()]


def _stored(tensor: Tensor, slot: GgufTensor, gguf: Any) -> np.ndarray:
    """The bytes of a tensor. Raises OutOfRange for a number that would become infinite."""
    if slot.kind == "Q8_0":
        values = narrowed(tensor, torch.float32, slot.name).contiguous()
        narrowed(values.abs().amax() / _LARGEST, torch.float16, slot.name)  # the scale of a block
        return gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    dtype = next(dtype for dtype, kind in _TYPES.items() if kind == slot.kind)
    values = narrowed(tensor, dtype, slot.name).contiguous()
    return (values.view(torch.int16) if dtype is torch.bfloat16 else values).numpy()


def _add_tokenizer(writer: Any, source: Source, options: TargetOptions) -> None:
    """Add the model's tokenizer. Without one llama.cpp opens the file for ids alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.without_tokenizer:
            carried = copyable(source.companions, source.report.notes.append).get("tokenizer.model")
            write_tokenizer(source, folder, {})
            if carried is not None:
                (folder / "tokenizer.model").write_bytes(carried.read_bytes())
        vocabulary = vocabulary_in(folder)
        if vocabulary is None:
            writer.add_tokenizer_model("no_vocab")
            return
        size = source.model.vocab_size
        assert size is not None
        vocabulary = vocabulary.padded(size)
        usage = usage_in(folder, vocabulary, source.run.data.eod_id, end_of_turn(source))
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, value in {**vocabulary.extra, **usage.ids}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_add_bos_token(usage.add_bos)
    writer.add_add_eos_token(False)
    if usage.template is not None:
        writer.add_chat_template(usage.template)
