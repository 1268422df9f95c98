"""Names and layouts of Hugging Face's BLOOM, GPT-2 and LLaMA weights, as tables.

A rule says which of their tensors make one of ours and how; each way of making has its inverse beside it. In a rule `{i}` is the
block's number. Shapes: n heads, g key-value heads, r = n/g, d head dim, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.derive import head_dim, query_groups
from megazero.config.schema import ModelConfig
from megazero.model.stage import Stage
from megazero.mpu.place import Place, place_of


@dataclass(frozen=True)
class Rearrangement:
    """ours: their tensors -> our tensor; theirs: the inverse."""

    ours: Callable[[ModelConfig, list[Tensor]], Tensor]
    theirs: Callable[[ModelConfig, Tensor], list[Tensor]]


def _thirds_to_heads(model: ModelConfig, tensors: list[Tensor]) -> Tensor:
    """[q | k | v] over the whole width, [3, n, d, ...] -> [n, 3, d, ...]."""
    (tensor,) = tensors
    return tensor.reshape(3, model.num_attention_heads, head_dim(model), -1).transpose(0, 1).reshape(tensor.shape)


def _heads_to_thirds(model: ModelConfig, tensor: Tensor) -> list[Tensor]:
    return [tensor.reshape(model.num_attention_heads, 3, head_dim(model), -1).transpose(0, 1).reshape(tensor.shape)]


def _separate_to_groups(model: ModelConfig, tensors: list[Tensor]) -> Tensor:
    """q [n, d, ...], k and v [g, d, ...] -> [g, r + 2, d, ...]."""
    groups, size = query_groups(model), head_dim(model)
    parts = [tensor.reshape(groups, -1, size, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(parts, dim=1).reshape(-1, *tensors[0].shape[1:])


def _groups_to_separate(model: ModelConfig, tensor: Tensor) -> list[Tensor]:
    groups, size = query_groups(model), head_dim(model)
    repeats = model.num_attention_heads // groups
    parts = tensor.reshape(groups, repeats + 2, size, *tensor.shape[1:]).split([repeats, 1, 1], dim=1)
    return [part.reshape(-1, *tensor.shape[1:]) for part in parts]


SAME = Rearrangement(lambda _, t: t[0], lambda _, t: [t])
TRANSPOSED = Rearrangement(lambda _, t: t[0].t(), lambda _, t: [t.t()])
THIRDS = Rearrangement(_thirds_to_heads, _heads_to_thirds)
TRANSPOSED_THIRDS = Rearrangement(lambda m, t: _thirds_to_heads(m, [t[0].t()]), lambda m, t: [_heads_to_thirds(m, t)[0].t()])
SEPARATE = Rearrangement(_separate_to_groups, _groups_to_separate)


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors it is made of."""

    ours: str
    theirs: tuple[str, ...]
    how: Rearrangement = SAME


def _pair(ours: str, theirs: str, weight: Rearrangement = SAME, bias: Rearrangement = SAME) -> tuple[Rule, Rule]:
    return Rule(f"{ours}.weight", (f"{theirs}.weight",), weight), Rule(f"{ours}.bias", (f"{theirs}.bias",), bias)


@dataclass(frozen=True)
class Family:
    """A kind of model of theirs: the prefix that its files may lack, and its rules."""

    prefix: str
    rules: tuple[Rule, ...]


FAMILIES: Mapping[str, Family] = {
    "bloom": Family(
        "transformer.",
        (
            Rule("embedding.word.weight", ("word_embeddings.weight",)),
            *_pair("embedding.norm", "word_embeddings_layernorm"),
            *_pair("blocks.{i}.attention_norm", "h.{i}.input_layernorm"),
            *_pair("blocks.{i}.attention.qkv", "h.{i}.self_attention.query_key_value"),
            *_pair("blocks.{i}.attention.output", "h.{i}.self_attention.dense"),
            *_pair("blocks.{i}.mlp_norm", "h.{i}.post_attention_layernorm"),
            *_pair("blocks.{i}.mlp.up", "h.{i}.mlp.dense_h_to_4h"),
            *_pair("blocks.{i}.mlp.down", "h.{i}.mlp.dense_4h_to_h"),
            *_pair("head.norm", "ln_f"),
            Rule("head.weight", ("lm_head.weight",)),
        ),
    ),
    "gpt2": Family(
        "transformer.",
        (
            Rule("embedding.word.weight", ("wte.weight",)),
            Rule("embedding.position.weight", ("wpe.weight",)),
            *_pair("blocks.{i}.attention_norm", "h.{i}.ln_1"),
            *_pair("blocks.{i}.attention.qkv", "h.{i}.attn.c_attn", TRANSPOSED_THIRDS, THIRDS),
            *_pair("blocks.{i}.attention.output", "h.{i}.attn.c_proj", TRANSPOSED),
            *_pair("blocks.{i}.mlp_norm", "h.{i}.ln_2"),
            *_pair("blocks.{i}.mlp.up", "h.{i}.mlp.c_fc", TRANSPOSED),
            *_pair("blocks.{i}.mlp.down", "h.{i}.mlp.c_proj", TRANSPOSED),
            *_pair("head.norm", "ln_f"),
            Rule("head.weight", ("lm_head.weight",)),
        ),
    ),
    "llama": Family(
        "model.",
        (
            Rule("embedding.word.weight", ("embed_tokens.weight",)),
            Rule("blocks.{i}.attention_norm.weight", ("layers.{i}.input_layernorm.weight",)),
            *(
                Rule(f"blocks.{{i}}.attention.qkv.{kind}", tuple(f"layers.{{i}}.self_attn.{x}_proj.{kind}" for x in "qkv"), SEPARATE)
                for kind in ("weight", "bias")
            ),
            *_pair("blocks.{i}.attention.output", "layers.{i}.self_attn.o_proj"),
            Rule("blocks.{i}.mlp_norm.weight", ("layers.{i}.post_attention_layernorm.weight",)),
            *_pair("blocks.{i}.mlp.gate", "layers.{i}.mlp.gate_proj"),
            *_pair("blocks.{i}.mlp.up", "layers.{i}.mlp.up_proj"),
            *_pair("blocks.{i}.mlp.down", "layers.{i}.mlp.down_proj"),
            Rule("head.norm.weight", ("norm.weight",)),
            Rule("head.weight", ("lm_head.weight",)),
        ),
    ),
}


def rule_of(family: str, name: str) -> Rule:
    """The rule for one of our parameters, its block's number filled in. Raises ValueError for a name the family has no tensor for."""
    pattern, number = name, ""
    parts = name.split(".")
    if parts[0] == "blocks":
        number = parts[1]
        pattern = ".".join(["blocks", "{i}", *parts[2:]])
    for rule in FAMILIES[family].rules:
        if rule.ours == pattern:
            return Rule(name, tuple(key.replace("{i}", number) for key in rule.theirs), rule.how)
    raise ValueError(f"{family} models of Hugging Face have no {name}")


def from_transformers(family: str, model: ModelConfig, name: str, state: Mapping[str, Tensor]) -> Tensor:
    """Our global tensor `name` from their state dict, whose keys may carry the family's prefix or not. Raises ValueError, naming what is missing."""
    rule, prefix = rule_of(family, name), FAMILIES[family].prefix
    found = [next((k for k in (prefix + key, key) if k in state), None) for key in rule.theirs]
    if None in found:
        raise ValueError(f"{name} is made of {', '.join(rule.theirs)}, of which the state dict holds {[k for k in found if k]}")
    return rule.how.ours(model, [state[key] for key in found if key is not None])


def to_transformers(family: str, model: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Their tensors, with the family's prefix, from our global tensor `name`."""
    rule, prefix = rule_of(family, name), FAMILIES[family].prefix
    keys = [key if key.startswith("lm_head.") else prefix + key for key in rule.theirs]
    return dict(zip(keys, rule.how.theirs(model, tensor), strict=True))


def load_transformers_state(stage: Stage, family: str, state: Mapping[str, Tensor]) -> None:
    """Fill a stage with what it holds of their weights. Raises ValueError when a tensor is missing or has another shape."""
    with torch.no_grad():
        for parameter in stage.parameters():
            place = place_of(parameter)
            fill(parameter, place, from_transformers(family, stage.layout.model, place.name, state))


def fill(local: Tensor, place: Place, whole: Tensor) -> None:
    """Copy this rank's box of the global tensor; padding rows become zero. Raises ValueError when the global shape differs."""
    if tuple(whole.shape) != place.shape:
        raise ValueError(f"{place.name} has shape {place.shape}, not {tuple(whole.shape)}")
    piece = whole[tuple(slice(start, stop) for start, stop in place.box)]
    local.zero_()
    local[: piece.shape[0]].copy_(piece)
