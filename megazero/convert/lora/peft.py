"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

Where one layer of ours is several of theirs (query, key and value), each of them gets the same A and its own rows of B.
Where several of ours are one of theirs (gate and up of Phi-3), that one gets all their A above each other, and a B with
a block for each layer; layers that share A need it once. PEFT computes x A^T B^T however a layer stores its weight.
`fan_in_fan_out` says that the layer stores it transposed (GPT-2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.config.derive import lora_alpha, lora_scale
from megazero.config.inventory import adaptable_layers
from megazero.config.schema import ModelConfig
from megazero.convert.files.safetensors_file import TensorHeader, write_safetensors
from megazero.convert.formats import Advance, TargetOptions
from megazero.convert.hf.config import family_for, read_json
from megazero.convert.hf.rearrange import TRANSPOSED, TRANSPOSED_THIRDS
from megazero.convert.hf.rules import Names, Rule
from megazero.convert.hf.tables import Family
from megazero.convert.lora.merged import FACTORS, AdaptedSource, AdaptersAlone
from megazero.convert.source import WEIGHT, ConversionError, Source
from megazero.system.hub import name_of

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


@dataclass(frozen=True)
class _Module:
    """A module of theirs with an adapter.

    pair     the layer of ours that it is a part of
    part     which part
    columns  the columns of the layer's B, and rows of its A, that the module has: [rank of the module], int64
    joined   the layers of ours that make the module together; empty where `pair` alone does
    """

    name: str
    pair: AdapterPair
    part: int
    columns: Tensor
    joined: tuple[str, ...] = ()

    def factors(self, adapters: Source) -> tuple[Tensor, Tensor]:
        """A and B of the module."""
        if self.joined:
            return _joined_factors(adapters, self.joined)
        a, b = (adapters.read(f"{self.pair.layer}.{factor}") for factor in FACTORS)
        return a[self.columns], self.pair.parts(adapters.model, b)[self.part][:, self.columns]


def _joined_factors(adapters: Source, layers: Sequence[str]) -> tuple[Tensor, Tensor]:
    """A and B of one module that is these layers, one behind the other."""
    of_a, of_b = ([adapters.read(f"{layer}.{factor}") for layer in layers] for factor in FACTORS)
    if all(torch.equal(a, of_a[0]) for a in of_a):
        return of_a[0], torch.cat(of_b)
    return torch.cat(of_a), torch.block_diag(*of_b)


def _modules(names: Names, adapters: Source) -> list[_Module]:
    """The modules with an adapter, in the model's order.

    Where the parts of a layer came with an A each (`peft_reader` puts them above each other), each part gets its own
    back: the columns of B in which it alone has values. A part without values in any has no adapter. Columns that no
    part has values in belong to all.
    """
    model, modules = adapters.model, []
    for number in range(model.num_layers):
        for pair in pairs_of_block(names, number, adaptable_layers(model)):
            if f"{pair.layer}.{FACTORS[1]}" not in adapters.entries:
                continue
            if pair.rule.joined:
                layers = tuple(name.removesuffix(".weight") for name in pair.rule.joined)
                if pair.layer == layers[0]:  # the first of them writes the module
                    rank = len(_joined_factors(adapters, layers)[0])
                    modules.append(_Module(pair.modules[0], pair, 0, torch.arange(rank), layers))
                continue
            used = [part.ne(0).any(0) for part in pair.parts(model, adapters.read(f"{pair.layer}.{FACTORS[1]}"))]
            unused = ~torch.stack(used).any(0)
            columns = [torch.nonzero(of_part | unused).flatten() for of_part in used]
            modules += [
                _Module(name, pair, part, own)
                for part, (name, own) in enumerate(zip(pair.modules, columns, strict=True))
                if len(own)
            ]
    return modules


def _target_modules(names: Names, model: ModelConfig, wanted: Sequence[str]) -> list[str]:
    """The ends of module names that PEFT matches, as short as they name no module without an adapter."""
    every = [
        module
        for number in range(model.num_layers)
        for pair in pairs_of_block(names, number, adaptable_layers(model))
        for module in pair.modules
    ]
    unwanted = set(every).difference(wanted)

    def end(module: str, parts: int) -> str:
        return ".".join(module.split(".")[-parts:])

    taken = {parts: {end(module, parts) for module in unwanted} for parts in (1, 2)}
    ends = ((end(module, 1), end(module, 2), module) for module in wanted)
    return sorted({one if one not in taken[1] else two if two not in taken[2] else whole for one, two, whole in ends})


def _config(names: Names, adapters: Source, modules: Sequence[_Module], base: str) -> dict[str, Any]:
    """The content of adapter_config.json. base: the path or name at which PEFT will look for the base model."""
    lora, on_hub = adapters.run.lora, name_of(base)
    ranks = {module.name: len(module.columns) for module in modules if len(module.columns) != lora.lora_rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if on_hub is None else on_hub.repository,
        "revision": None if on_hub is None else on_hub.revision,
        "r": lora.lora_rank,
        "lora_alpha": _number(lora_alpha(lora)),
        "rank_pattern": ranks,
        "alpha_pattern": {name: _number(lora_scale(lora) * rank) for name, rank in ranks.items()},
        "lora_dropout": lora.lora_dropout,
        "target_modules": _target_modules(names, adapters.model, [module.name for module in modules]),
        "fan_in_fan_out": any(_transposed(module.pair.rule) for module in modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def write_adapters(
    adapters: Source,
    names: Names,
    base: str,
    folder: Path,
    advance: Advance = lambda _: None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write both files into an existing folder. adapters: a checkpoint's adapters, not merged, of any of its layers.
    dtype: None keeps theirs.

    Raises OSError.
    """
    modules = _modules(names, adapters)

    def tensors() -> Iterator[Tensor]:
        for layer, parts in groupby(modules, lambda module: module.pair.layer):
            for module in parts:
                yield from module.factors(adapters)
            layers = module.joined or (layer,)
            advance(sum(adapters.entries[f"{name}.{factor}"].nbytes() for name in layers for factor in FACTORS))

    slots = [slot for module in modules for slot in _slots(module, adapters, dtype)]
    write_safetensors(folder / TENSORS, slots, tensors(), {"format": "pt"})
    with open(folder / CONFIG, "x") as file:
        json.dump(_config(names, adapters, modules, base), file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _slots(module: _Module, adapters: Source, wanted: torch.dtype | None) -> Iterator[TensorHeader]:
    a, b = (adapters.entries[f"{module.pair.layer}.{factor}"] for factor in FACTORS)
    rows = module.pair.parts(adapters.model, torch.empty(b.shape, device="meta"))[module.part].shape[0]
    rank = len(module.columns)
    yield TensorHeader(key_of(module.name, "A"), wanted or a.columns[WEIGHT], (rank, a.shape[1]))
    yield TensorHeader(key_of(module.name, "B"), wanted or b.columns[WEIGHT], (rows, rank))


def family_of(model: ModelConfig, base: Source) -> Family:
    """The base model's family, or one that computes the same where the model comes from none.

    Raises ConversionError.
    """
    own = base.companions.get("config.json")
    return family_for(model, read_json(own).get("model_type") if own else None)


def names_for(model: ModelConfig, base: Source) -> Names:
    """The names of `family_of`. Raises ConversionError."""
    return family_of(model, base).names


def adapters_of(source: Source) -> Source:
    """The part of a source that is written (`Format.part`). Raises ConversionError where it has no adapters, and where
    they lie in the folder of their model.
    """
    if not isinstance(source, AdaptedSource):
        raise ConversionError(
            f"{source.path} holds no adapters as they were trained; --to peft writes those of a run with --lora-rank"
        )
    if source.base.path == source.path:
        raise ConversionError(
            f"{source.path} holds the model itself too, and adapters are written with the folder of their model, which "
            f"must hold one thing: move {CONFIG} and the adapters' weights into a folder of their own"
        )
    return AdaptersAlone(source)


def write_peft(source: Source, folder: Path, options: TargetOptions, advance: Advance) -> None:
    """`Format.write`. source: by `adapters_of`.

    Weights keep the dtype that they were trained in, unless `options.dtype` rounds them.
    """
    assert isinstance(source, AdaptersAlone)
    write_adapters(source, names_for(source.model, source.base), str(source.base.path), folder, advance, options.dtype)
