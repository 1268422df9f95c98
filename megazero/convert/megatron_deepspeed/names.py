"""Megatron-DeepSpeed's names for our tensors: a layer of its pipeline, and a key in that layer's files.

Layers are counted along the pipeline, including functions without weights. BLOOM: 1 embedding, 3 .. L+2 blocks, L+4
final LayerNorm; the tied head is not stored. Other versions count differently, so a layer is recognised by its keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.config.inventory import WORDS
from megazero.config.schema import ModelConfig
from megazero.convert.source import ConversionError, parameter_specs

TIED = "tied_modules.embed."
"""The prefix of the tied embedding's parameters in the optimizer's files, which give it no layer number."""

_EMBEDDING: Mapping[str, str] = {
    "embedding.word.weight": "word_embeddings.weight",
    "embedding.norm.weight": "word_embeddings.norm.weight",
    "embedding.norm.bias": "word_embeddings.norm.bias",
    "embedding.position.weight": "position_embeddings.weight",
}
_FINAL: Mapping[str, str] = {"head.norm.weight": "weight", "head.norm.bias": "bias"}
_HEAD: Mapping[str, str] = {"head.weight": "lm_head.weight"}
_PARTS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_QKV = _PARTS["attention.qkv"] + ".weight"

IGNORED: Mapping[str, str] = {
    r".*inv_freq": "follows from the rotary base",
    r".*(attention\.bias|masked_bias)": "the causal mask",
}
"""Keys, as regular expressions, that hold nothing of the model; and why."""


@dataclass(frozen=True)
class PipelineTensor:
    """Where a tensor is: the number of its layer, and its key in the layer's files. half: the half of a rank's rows
    that is ours, for a gated layer's [gate; up].
    """

    layer: int
    key: str
    half: int | None = None


@dataclass(frozen=True)
class Layers:
    """The numbers of the layers, by what they hold.

    head  of an untied head; None where head and embedding are tied. Then the optimizer's files name the embedding's
          parameters by `TIED`
    """

    embedding: int
    blocks: tuple[int, ...]
    final: int
    head: int | None = None

    @property
    def tied(self) -> bool:
        return self.head is None

    def parameter(self, layer: int, key: str) -> str:
        """The name of a parameter in the optimizer's files."""
        return f"{TIED}{key}" if self.tied and layer == self.embedding else f"{layer}.{key}"

    def place(self, parameter: str) -> tuple[int, str] | None:
        """(layer, key) of a name in the optimizer's files. None where it is not such a name."""
        name = parameter.removeprefix("module.")
        if name.startswith(TIED):
            return self.embedding, name.removeprefix(TIED)
        number, _, key = name.partition(".")
        return (int(number), key) if number.isdecimal() else None


def bloom_layers(model: ModelConfig) -> Layers:
    """The numbers of the layers in BLOOM's files."""
    blocks = tuple(range(3, model.num_layers + 3))
    return Layers(
        1, blocks, model.num_layers + 4, model.num_layers + 5 if model.untie_embeddings_and_output_weights else None
    )


def found_layers(keys: Mapping[int, tuple[str, ...]], where: str) -> Layers:
    """The layers of a checkpoint, recognised by the keys in their files. Raises ConversionError where they make no GPT
    or BLOOM.
    """
    order = sorted(keys)
    embedding = [n for n in order if _EMBEDDING[WORDS] in keys[n]]
    blocks = [n for n in order if _QKV in keys[n]]
    behind = [n for n in order if blocks and n > blocks[-1]]
    final = [n for n in behind if "weight" in keys[n]]
    head = [n for n in behind if n not in final[:1] and ({"lm_head.weight", "weight"} & set(keys[n]))]
    problems = []
    if len(embedding) != 1:
        problems.append(f"{len(embedding)} layers have {_EMBEDDING[WORDS]}, one is expected")
    if not blocks:
        problems.append(f"no layer has {_QKV}")
    elif blocks != list(range(blocks[0], blocks[-1] + 1)):
        missing = sorted(set(range(blocks[0], blocks[-1] + 1)) - set(blocks))
        problems.append(f"layers {', '.join(map(str, missing))} are missing or are no transformer blocks")
    if blocks and not final:
        problems.append("there is no final norm (a layer behind the blocks with the key 'weight')")
    if len(head) > 1:
        problems.append(f"layers {', '.join(map(str, head))} could all be the head")
    if problems:
        raise ConversionError(
            f"{where} is not a GPT or BLOOM model in Megatron-DeepSpeed's layout: " + "; ".join(problems)
        )
    return Layers(embedding[0], tuple(blocks), final[0], head[0] if head else None)


def theirs(model: ModelConfig, layers: Layers, head_key: str = "lm_head.weight") -> dict[str, PipelineTensor]:
    """Every tensor of a model by its global name."""
    return {name: _of(name, model, layers, head_key) for name in parameter_specs(model)}


def _of(name: str, model: ModelConfig, layers: Layers, head_key: str) -> PipelineTensor:
    if name in _EMBEDDING:
        return PipelineTensor(layers.embedding, _EMBEDDING[name])
    if name in _FINAL:
        return PipelineTensor(layers.final, _FINAL[name])
    if name in _HEAD:
        assert layers.head is not None
        return PipelineTensor(layers.head, head_key)
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    half = None
    if model.activation == "swiglu" and part in ("mlp.gate", "mlp.up"):
        half = ("mlp.gate", "mlp.up").index(part)
        part = "mlp.up"
    return PipelineTensor(layers.blocks[int(number)], f"{_PARTS[part]}.{kind}", half)


def why_ignored(key: str) -> str | None:
    """Why a key is not needed, if it is one of those that are known not to be."""
    return next((why for pattern, why in IGNORED.items() if re.fullmatch(pattern, key)), None)
