"""Parameters' names in universal checkpoints: those of the module that DeepSpeed trained, which is Megatron-DeepSpeed's
here.

Its pipeline numbers layers (`tied_modules.embed.word_embeddings.weight`, `3.input_layernorm.weight`), its plain model
names them (`language_model.encoder.layers.0.input_layernorm.weight`). Both are taken as (layer, key) of the pipeline's
layer files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megazero.config.schema import ModelConfig
from megazero.convert.megatron_deepspeed.names import TIED, Layers, PipelineTensor, bloom_layers, found_layers, theirs

_NUMBERED = re.compile(r"(\d+)\.(.+)")
_PLAIN = re.compile(r"language_model\.(?:encoder|transformer)\.layers\.(\d+)\.(.+)")
_EMBEDDING = re.compile(r"language_model\.embedding\.(.+)")
_FINAL = re.compile(r"language_model\.(?:encoder|transformer)\.final_(?:layernorm|norm)\.(weight|bias)")
_HEAD = "language_model.output_layer.weight"
_PIPELINE_EMBEDDING, _FIRST_BLOCK, _FAR = 1, 3, 1 << 20


@dataclass(frozen=True)
class TensorNames:
    """names: (layer, key) -> the checkpoint's name. layers: which layer is what. theirs: ours by global name -> layer,
    key, half.
    """

    names: Mapping[tuple[int, str], str]
    layers: Layers

    def theirs(self, model: ModelConfig) -> dict[str, PipelineTensor]:
        """Every tensor of a model by its global name."""
        return theirs(model, self.layers)


def classify_names(found: Iterable[str], where: str) -> tuple[TensorNames, list[str]]:
    """Names told apart, and those that are none of a GPT's.

    Raises ConversionError where they are no whole GPT or BLOOM.
    """
    places = {name: _place(name.removeprefix("module.")) for name in sorted(found)}
    names = {place: name for name, place in places.items() if place is not None}
    keys: dict[int, list[str]] = {}
    for layer, key in names:
        keys.setdefault(layer, []).append(key)
    layers = found_layers({layer: tuple(inside) for layer, inside in keys.items()}, where)
    return TensorNames(names, layers), [name for name, place in places.items() if place is None]


def _place(name: str) -> tuple[int, str] | None:
    if name.startswith(TIED):
        return _PIPELINE_EMBEDDING, name.removeprefix(TIED)
    if match := _EMBEDDING.fullmatch(name):
        return _PIPELINE_EMBEDDING, match[1]
    if match := _NUMBERED.fullmatch(name):
        return int(match[1]), match[2]
    if match := _PLAIN.fullmatch(name):
        return _FIRST_BLOCK + int(match[1]), match[2]
    if match := _FINAL.fullmatch(name):
        return _FAR, match[1]
    return (_FAR + 1, "lm_head.weight") if name == _HEAD else None


def written_names(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """A name as BLOOM's pipeline has it -> ours that its rows are made of, in order (a gated layer's two are one)."""
    layers = bloom_layers(model)
    found: dict[str, tuple[str, ...]] = {}
    for name, where in theirs(model, layers).items():
        key = layers.parameter(where.layer, where.key)
        found[key] = (*found.get(key, ()), name)
    return found
