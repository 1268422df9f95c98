"""Adapters that PEFT wrote, on the model that they belong to.

In PEFT query, key and value may have an adapter each, or only some of them have one. For us they are one layer.
Adapters that share A become one of the same rank. Others become one with all their A above each other, and with zeros
in B where a part has no adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.window import TensorInfo
from megazero.config.derive import lora_scale
from megazero.config.inventory import adaptable_layers
from megazero.config.options import run_options
from megazero.config.schema import CheckpointConfig, LoraConfig, ModelConfig, Run
from megazero.config.validate import out_of_range
from megazero.convert.hf.config import read_json
from megazero.convert.hf.files import LazyTensor, tensors_of
from megazero.convert.lora.merged import FACTORS, UnboundAdapters
from megazero.convert.lora.peft import CONFIG, TENSORS, AdapterPair, family_of, key_of, pairs_of_block
from megazero.convert.lora.targets import AdapterTargets, adapter_targets
from megazero.convert.source import WEIGHT, ConversionError, Source
from megazero.system.hub import hub_name
from megazero.system.reading import shown

TORCH_TENSORS = "adapter_model.bin"

_ANY = frozenset(
    """alpha_pattern auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode
    layers_pattern layers_to_transform lora_alpha lora_dropout megatron_config megatron_core peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules use_rslora""".split()
)
"""Keys of adapter_config.json that leave an adapter W + scale B A whatever they hold, or of which the scale or the set
of modules (`targets`) is made.
"""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Keys that leave it so with these values. Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ) change W."""
_NOTHING: tuple[Any, ...] = (None, False, {}, [], ())
"""The values with which every other key, also one that nobody knows yet, leaves it so."""

_CONVERTED = (
    "; PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...) makes plain LoRA of an adapter that "
    "changes its base"
)


def recognises(path: Path) -> bool:
    """Whether a folder has an adapter_config.json, by which transformers takes it for adapters."""
    return (path / CONFIG).is_file()


def adapter_file(path: Path) -> Path:
    """The file of a folder with the adapters' weights: PEFT's own, or the one that it wrote in former years."""
    return path / (TORCH_TENSORS if not (path / TENSORS).is_file() and (path / TORCH_TENSORS).is_file() else TENSORS)


def open_peft(path: Path) -> PeftAdapters:
    """Adapters that get their names once the model is known (`PeftAdapters.on`). Raises ConversionError."""
    config = read_json(path / CONFIG)
    wrong = [
        f"{key} {shown(value)}"
        for key, value in {"peft_type": None, **config}.items()
        if key not in _ANY and value not in _ONLY.get(key, _NOTHING)
    ]
    if wrong:
        begun = isinstance(config.get("init_lora_weights"), str) * _CONVERTED
        raise ConversionError(
            f"{path / CONFIG}: {', '.join(wrong)}; what is read is plain LoRA of a causal language model, "
            f"W + scale B A{begun}"
        )
    try:
        targets = adapter_targets(config)
    except ValueError as error:
        raise ConversionError(f"{path / CONFIG}: {error}") from error
    for key, field in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        try:
            reason = out_of_range(field, run_options()[field].from_value(config.get(key)) or 0)
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            raise ConversionError(f"{path / CONFIG}: {key} {shown(config.get(key))} {reason}")
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ConversionError(f"{path / CONFIG}: base_model_name_or_path {shown(base)} is no path")
    if base == "":
        raise ConversionError(f"{path / CONFIG}: base_model_name_or_path is empty, and names no model of the adapters")
    if not adapter_file(path).is_file():
        raise ConversionError(f"{path} has {CONFIG}, and neither {TENSORS} nor {TORCH_TENSORS} beside it")
    with ExitStack() as stack:
        source = PeftAdapters(path, config, targets, dict(tensors_of(adapter_file(path), stack)))
        source.closing = stack.pop_all()
    return source


class PeftAdapters(UnboundAdapters):
    """PEFT's two files, before the model that they belong to is known."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], targets: AdapterTargets, stored: Mapping[str, LazyTensor]
    ) -> None:
        base = config.get("base_model_name_or_path")
        revision = config.get("revision")
        if isinstance(base, str) and isinstance(revision, str) and hub_name(base) is not None:
            base = f"{base}@{revision}"
        lora = LoraConfig(lora_rank=int(config["r"]), lora_alpha=float(config["lora_alpha"]))
        super().__init__("peft", path, Run(checkpoint=CheckpointConfig(init_from=base), lora=lora), {})
        self.stored, self.by_root = stored, bool(config.get("use_rslora"))
        self.targets = targets

    def on(self, base: Source) -> Source:
        return BoundAdapters(self, base)


@dataclass(frozen=True)
class _Part:
    """One of their layers inside one of ours: its adapter, if it has one, and the factor of its B."""

    a: LazyTensor | None = None
    b: LazyTensor | None = None
    factor: float = 1.0
    columns: Tensor | None = None
    """The columns of B, and rows of A, that are this layer's, where their layer is several of ours; None: all."""

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0] if self.columns is None else len(self.columns)

    def read_a(self) -> Tensor:
        assert self.a is not None
        return self.a.read() if self.columns is None else self.a.read()[self.columns]

    @property
    def dtype_of_b(self) -> torch.dtype:
        """Of B with its factor, a product in at least fp32: in a half, it would be rounded again, or be no number."""
        assert self.b is not None and self.b.dtype is not None
        return self.b.dtype if self.factor == 1.0 else torch.promote_types(self.b.dtype, torch.float32)

    def scaled_b(self, dtype: torch.dtype) -> Tensor:
        """B times its factor, [out, rank]. dtype: at least `dtype_of_b`."""
        assert self.b is not None
        b = self.b.read().to(dtype)
        b = b if self.columns is None else b[:, self.columns]
        return b if self.factor == 1.0 else b * self.factor


class BoundAdapters(Source):
    """The adapters of a known model, under our names."""

    def __init__(self, files: PeftAdapters, base: Source) -> None:
        run = replace(
            base.run,
            lora=files.run.lora,
            checkpoint=replace(base.run.checkpoint, init_from=files.run.checkpoint.init_from),
        )
        super().__init__("peft", files.path, run, {}, closing=files.closing)
        family, left = family_of(base.model, base), set(files.stored)
        self._layers: dict[str, tuple[AdapterPair, list[_Part], bool]] = {}
        entries: dict[str, TensorInfo] = {}
        for number in range(base.model.num_layers):
            for pair in pairs_of_block(family.names, number, adaptable_layers(base.model)):
                parts = [self._part(files, module, family.model_type) for module in pair.modules]
                left -= {key_of(module, factor) for module in pair.modules for factor in "AB"}
                if pair.rule.joined:
                    parts = [_of_one_layer(base.model, pair, part) for part in parts]
                if any(part.rank for part in parts):
                    self._layers[pair.layer] = pair, parts, _share_a(parts)
                    entries |= dict(self._entries(base, pair, parts))
        if left:
            raise ConversionError(
                f"{files.path} has adapters of what the model has not: {', '.join(sorted(left)[:20])}"
            )
        self.entries = entries

    def _part(self, files: PeftAdapters, module: str, family: str) -> _Part:
        a, b = key_of(module, "A"), key_of(module, "B")
        left_out = files.targets.leaves_out(module, family)
        if a not in files.stored and b not in files.stored:
            if left_out is None:
                raise ConversionError(
                    f"{files.path / CONFIG}: {files.targets.said('target_modules')} gives {module} an adapter, and "
                    f"{adapter_file(files.path).name} has no {a}"
                )
            return _Part()
        shapes = [files.stored[key].shape if key in files.stored else () for key in (a, b)]
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise ConversionError(f"{files.path}: {a} and {b} do not belong together")
        rank = shapes[0][0]
        if not rank:
            raise ConversionError(f"{adapter_file(files.path)}: {a} is of rank 0")
        assert self.run.lora.lora_rank is not None and self.run.lora.lora_alpha is not None
        where, wanted = files.targets.rank(module, self.run.lora.lora_rank)
        told = f"{adapter_file(files.path).name} has {a} of rank {rank}"
        if left_out is not None:
            raise ConversionError(f"{files.path / CONFIG}: {left_out} gives {module} no adapter, and {told}")
        if rank != wanted:
            raise ConversionError(f"{files.path / CONFIG}: {where} gives {module} rank {wanted}, and {told}")
        own = files.targets.alpha(module, self.run.lora.lora_alpha) / (math.sqrt(rank) if files.by_root else rank)
        return _Part(files.stored[a], files.stored[b], own / lora_scale(self.run.lora))

    def _entries(self, base: Source, pair: AdapterPair, parts: list[_Part]) -> Iterator[tuple[str, TensorInfo]]:
        weight = base.entries[f"{pair.layer}.weight"].shape
        theirs = pair.parts(base.model, torch.empty(weight, device="meta"))
        for module, part, whole in zip(pair.modules, parts, theirs, strict=True):
            if part.a is not None and part.b is not None and (part.b.shape[0], part.a.shape[1]) != tuple(whole.shape):
                raise ConversionError(
                    f"{self.path}: the adapter of {module} is for {part.b.shape[0]} x {part.a.shape[1]}, not "
                    f"{list(whole.shape)}"
                )
        rank = parts[0].rank if self._layers[pair.layer][2] else sum(part.rank for part in parts)
        a, b = (f"{pair.layer}.{factor}" for factor in FACTORS)
        yield a, TensorInfo((rank, weight[1]), {WEIGHT: _widest(part.a.dtype for part in parts if part.a is not None)})
        yield (
            b,
            TensorInfo((weight[0], rank), {WEIGHT: _widest(part.dtype_of_b for part in parts if part.b is not None)}),
        )

    def read(self, name: str, column: str = WEIGHT) -> Tensor:
        layer, _, factor = name.rpartition(".")
        pair, parts, shared = self._layers[layer]
        if factor == FACTORS[0]:
            dtype = self.entries[name].columns[column]
            found = [part.read_a().to(dtype) for part in parts if part.a is not None]
            return found[0] if shared else torch.cat(found)
        return pair.whole(self.model, list(_rows(self.model, pair, parts, shared, self.entries[name])))


def _of_one_layer(model: ModelConfig, pair: AdapterPair, part: _Part) -> _Part:
    """The columns in which one of several layers of ours has values in their B, or none of these layers has."""
    if part.b is None:
        return part
    b = part.b.read()
    used = pair.whole(model, [b]).ne(0).any(0)
    columns = torch.nonzero(used | b.eq(0).all(0)).flatten()
    return replace(part, columns=columns) if 0 < len(columns) < b.shape[1] else part


def _rows(
    model: ModelConfig, pair: AdapterPair, parts: list[_Part], shared: bool, entry: TensorInfo
) -> Iterator[Tensor]:
    """The rows of B for each part. A part that shares no A has values only in its own columns."""
    start, dtype = 0, entry.columns[WEIGHT]
    for part, whole in zip(parts, pair.parts(model, torch.empty(entry.shape, device="meta")), strict=True):
        if shared:
            yield part.scaled_b(dtype)
            continue
        rows = torch.zeros(tuple(whole.shape), dtype=dtype)
        if part.b is not None:
            rows[:, start : start + part.rank] = part.scaled_b(dtype)
        start += part.rank
        yield rows


def _widest(dtypes: Iterable[torch.dtype | None]) -> torch.dtype:
    """A dtype that holds the numbers of all of these."""
    return reduce(torch.promote_types, (dtype for dtype in dtypes if dtype is not None))


def _share_a(parts: list[_Part]) -> bool:
    """Whether all parts have an adapter, with the same A."""
    first = parts[0].a
    if first is None or any(part.a is None or part.a.shape != first.shape for part in parts):
        return False
    return all(part.a is not None and torch.equal(part.a.read(), first.read()) for part in parts[1:])
