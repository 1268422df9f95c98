"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

Where one layer of ours is several of theirs (query, key and value), each of them gets the same A and its own rows of B.
PEFT computes x A^T B^T however a layer stores its weight. `fan_in_fan_out` says that the layer stores it transposed
(GPT-2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.lora import adapted, alpha, layers_of
from megazero.config.schema import LoraConfig, ModelConfig
from megazero.convert.files.safetensors_file import TensorHeader, write_safetensors
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.hf.config import family_for, read_json
from megazero.convert.hf.rearrange import TRANSPOSED, TRANSPOSED_THIRDS
from megazero.convert.hf.rules import Names, Rule
from megazero.convert.lora.merged import FACTORS, AdaptedSource, AdaptersAlone
from megazero.convert.source import WEIGHT, ConversionError, Source

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ROOM = {"qkv": "attention", "output": "attention", "gate": "mlp", "up": "mlp", "down": "mlp"}
"""The part of a block that a linear layer belongs to."""


@dataclass(frozen=True)
class AdapterPair:
    """The adapter of one of our layers, and the modules of theirs that get it.

    layer    "blocks.3.attention.qkv"
    modules  "model.layers.3.self_attn.q_proj", ...
    """

    layer: str
    modules: tuple[str, ...]
    rule: Rule

    def parts(self, model: ModelConfig, b: Tensor) -> list[Tensor]:
        """The rows of B for each module, in the modules' order: [out, r] -> [out of the module, r]."""
        theirs = self.rule.how.theirs(model, b)
        return [part.t() for part in theirs] if _transposed(self.rule) else theirs

    def whole(self, model: ModelConfig, parts: list[Tensor]) -> Tensor:
        """The inverse of `parts`."""
        return self.rule.how.ours(model, [part.t() for part in parts] if _transposed(self.rule) else parts)


def _transposed(rule: Rule) -> bool:
    return rule.how in (TRANSPOSED, TRANSPOSED_THIRDS)


def pairs_of_block(names: Names, number: int, layers: tuple[str, ...]) -> Iterator[AdapterPair]:
    """The pairs of a block for these linear layers."""
    for layer in layers:
        ours = f"blocks.{number}.{ROOM[layer]}.{layer}"
        rule = names.rule(f"{ours}.weight")
        yield AdapterPair(ours, tuple(key.removesuffix(".weight") for key in names.written(rule)), rule)


def key_of(module: str, factor: str) -> str:
    """The key of a module's A or B in adapter_model.safetensors."""
    return f"base_model.model.{module}.lora_{factor}.weight"


def pairs(names: Names, model: ModelConfig, lora: LoraConfig) -> list[AdapterPair]:
    """All adapters of a run, in the model's order. Raises ValueError where the family has no tensor for a layer."""
    layers = adapted(lora, model)
    return [pair for number in range(model.num_layers) for pair in pairs_of_block(names, number, layers)]


def target_modules(names: Names, model: ModelConfig, lora: LoraConfig) -> list[str]:
    """The ends of module names that PEFT matches: the last part of the name, or two parts where another layer has the
    same last part.
    """
    every = [module for pair in pairs_of_block(names, 0, layers_of(model)) for module in pair.modules]
    wanted = [module for pair in pairs_of_block(names, 0, adapted(lora, model)) for module in pair.modules]

    def end(module: str, parts: int) -> str:
        return ".".join(module.split(".")[-parts:])

    unwanted = {end(module, 1) for module in every if module not in wanted}
    return sorted({end(module, 2 if end(module, 1) in unwanted else 1) for module in wanted})


def config_of(names: Names, model: ModelConfig, lora: LoraConfig, base: str) -> dict[str, Any]:
    """The content of adapter_config.json. base: the path or name at which PEFT will look for the base model."""
    number = alpha(lora)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": int(number) if number == int(number) else number,
        "lora_dropout": lora.lora_dropout,
        "target_modules": target_modules(names, model, lora),
        "fan_in_fan_out": any(_transposed(pair.rule) for pair in pairs_of_block(names, 0, adapted(lora, model))),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def write_adapters(
    adapters: Source,
    names: Names,
    base: str,
    folder: Path,
    advance: Advance = lambda _: None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write both files into an existing folder. adapters: a checkpoint's adapters, not merged. dtype: None keeps
    theirs.

    Raises OSError.
    """
    model, lora = adapters.model, adapters.run.lora
    found = pairs(names, model, lora)

    def tensors() -> Iterator[Tensor]:
        for pair in found:
            a, b = (adapters.read(f"{pair.layer}.{factor}") for factor in FACTORS)
            for rows in pair.parts(model, b):
                yield from (a, rows)
            advance(a.nbytes + b.nbytes)

    slots = [slot for pair in found for slot in _slots(pair, adapters, dtype)]
    write_safetensors(folder / TENSORS, slots, tensors(), {"format": "pt"})
    with open(folder / CONFIG, "x") as file:
        json.dump(config_of(names, model, lora, base), file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _slots(pair: AdapterPair, adapters: Source, wanted: torch.dtype | None) -> Iterator[TensorHeader]:
    a, b = (adapters.entries[f"{pair.layer}.{factor}"] for factor in FACTORS)
    rows = pair.parts(adapters.model, torch.empty(b.shape, device="meta"))
    for module, part in zip(pair.modules, rows, strict=True):
        for factor, shape, dtype in (("A", a.shape, a.columns[WEIGHT]), ("B", tuple(part.shape), b.columns[WEIGHT])):
            yield TensorHeader(key_of(module, factor), wanted or dtype, shape)


def names_for(model: ModelConfig, base: Source) -> Names:
    """The names of the base model's family, or of a family that computes the same where the model comes from none.

    Raises ConversionError.
    """
    own = base.companions.get("config.json")
    return family_for(model, read_json(own).get("model_type") if own else None).names


def adapters_of(source: Source) -> Source:
    """The part of a source that is written (`Format.part`). Raises ConversionError where it has no adapters."""
    if not isinstance(source, AdaptedSource):
        raise ConversionError(
            f"{source.path} holds no adapters as they were trained; --to peft writes those of a run with --lora-rank"
        )
    return AdaptersAlone(source)


def write_peft(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """`Format.write`. source: by `adapters_of`.

    Weights keep the dtype that they were trained in, unless `options.dtype` rounds them.
    """
    assert isinstance(source, AdaptersAlone)
    write_adapters(source, names_for(source.model, source.base), str(source.base.path), folder, advance, options.dtype)
