"""Megatron-LM's names for our tensors.

There are three ways of naming: the legacy model's (nested dictionaries, here joined with dots), Megatron-core's with
its own layers, and Megatron-core's with Transformer Engine, which keeps a norm inside the linear layer after it. Each
of our tensors has a list of names; the first that a file has is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.config.schema import ModelConfig
from megazero.convert.source import parameter_specs


@dataclass(frozen=True)
class MegatronTensor:
    """The names of a tensor, with the numbers of layers over the whole model. half: the half of its rows that is ours
    (0 or 1), for a gated layer's [gate; up]; None: all rows.
    """

    names: tuple[str, ...]
    half: int | None = None


LEGACY, LEGACY_BLOCKS = "language_model", ("encoder", "transformer")
_WHOLE: Mapping[str, tuple[str, ...]] = {
    "embedding.word.weight": ("embedding.word_embeddings.weight", f"{LEGACY}.embedding.word_embeddings.weight"),
    "embedding.position.weight": (
        "embedding.position_embeddings.weight",
        f"{LEGACY}.embedding.position_embeddings.weight",
    ),
    **{
        f"head.norm.{kind}": (
            f"decoder.final_layernorm.{kind}",
            *(
                f"{LEGACY}.{blocks}.{norm}.{kind}"
                for blocks in LEGACY_BLOCKS
                for norm in ("final_layernorm", "final_norm")
            ),
        )
        for kind in ("weight", "bias")
    },
    "head.weight": ("output_layer.weight", f"{LEGACY}.output_layer.weight"),
}
EMBEDDING, FINAL = _WHOLE["embedding.word.weight"], _WHOLE["head.norm.weight"]
"""The names of the embedding, which the first stage has, and of the final norm, which the last stage has."""
TIED_COPIES = ("output_layer.weight", "word_embeddings_for_head.weight")
"""The names of the last stage's copy of a tied embedding."""

_IN_BLOCK: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm.", "input_norm."),
    "attention.qkv": ("self_attention.linear_qkv.", "self_attention.query_key_value.", "attention.query_key_value."),
    "attention.output": ("self_attention.linear_proj.", "self_attention.dense.", "attention.dense."),
    "mlp_norm": (
        "mlp.linear_fc1.layer_norm_",
        "pre_mlp_layernorm.",
        "post_attention_layernorm.",
        "post_attention_norm.",
    ),
    "mlp.up": ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    "mlp.down": ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
}
BLOCKS = ("decoder.layers", *(f"{LEGACY}.{blocks}.layers" for blocks in LEGACY_BLOCKS))
"""The prefixes of a layer's number."""

NUMBERED = re.compile(rf"({'|'.join(map(re.escape, BLOCKS))})\.(\d+)\.(.*)")

IGNORED: Mapping[str, str] = {
    r"(.*\.)?_extra_state(/.*)?": "Transformer Engine's own state (FP8 scales)",
    r".*rotary_pos_emb\.inv_freq": "follows from the rotary base",
    r".*\.rotary_emb\.inv_freq": "follows from the rotary base",
    r".*\.attention\.bias|.*\.masked_bias": "the causal mask",
}
"""Keys, as regular expressions, that hold nothing of the model; and why."""


def theirs(model: ModelConfig) -> dict[str, MegatronTensor]:
    """Every tensor of a model by its global name."""
    return {name: _of(name, model) for name in parameter_specs(model)}


def _of(name: str, model: ModelConfig) -> MegatronTensor:
    if not name.startswith("blocks."):
        return MegatronTensor(_WHOLE.get(name, ()))
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    half = None
    if model.activation == "swiglu" and part in ("mlp.gate", "mlp.up"):
        part, half = "mlp.up", ("mlp.gate", "mlp.up").index(part)
    return MegatronTensor(
        tuple(f"{blocks}.{number}.{prefix}{kind}" for prefix in _IN_BLOCK[part] for blocks in BLOCKS), half
    )


def core_name(name: str, model: ModelConfig) -> MegatronTensor:
    """The name of one of our tensors in Megatron-core with Transformer Engine, with layers numbered over the whole
    model.
    """
    found = _of(name, model)
    return MegatronTensor(found.names[:1], found.half)


def why_ignored(key: str) -> str | None:
    """Why a key is not needed, if it is one of those that are known not to be."""
    return next((why for pattern, why in IGNORED.items() if re.fullmatch(pattern, key)), None)
