"""The families that llama.cpp computes: a row each. A family that is not here cannot be written.

Tensors come as transformers names and lays them out (`hf.tables.Family`), and the package gguf maps those names. A row
says what is between: prefixes that its map does not have, and what llama.cpp lays out in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megazero.config.derive import attention_scale, ffn_width, head_dim, max_positions, query_groups
from megazero.config.layers.kinds import pattern_items
from megazero.config.schema import ModelConfig
from megazero.convert.gguf.limits import (
    ATTENTION_BIAS,
    GEGLU_TANH,
    GELU,
    LOCAL_BASE,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    NO_WINDOW,
    TANH,
    UNTIED,
    head_scale,
    is_none,
    is_number,
    positions_but,
    windows_but,
)
from megazero.convert.gguf.rope import scalings
from megazero.convert.hf.layer_keys import only_window
from megazero.convert.hf.rope import settings_of_model
from megazero.convert.hf.tables import ModelRequirement

Rearrange = Callable[[ModelConfig, Tensor], Tensor]


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp knows a family as.

    name       of `gguf.MODEL_ARCH`
    metadata   method of `gguf.GGUFWriter` without its add_ -> the number that it gets, beside those of `COMMON`
    rearrange  end of a tensor's name over there -> llama.cpp's layout of the tensor
    prefix     beginning of names that gguf's map does not have
    needs      what llama.cpp fixes beyond what the family does
    nearly     what llama.cpp computes with a small error, which is reported
    """

    name: str
    metadata: Mapping[str, Callable[[ModelConfig], Any]]
    rearrange: Mapping[str, Rearrange] = field(default_factory=dict)
    prefix: str = ""
    needs: tuple[ModelRequirement, ...] = ()
    nearly: tuple[ModelRequirement, ...] = ()

    def laid_out(self, key: str, model: ModelConfig, tensor: Tensor) -> Tensor:
        """A tensor of transformers as llama.cpp has it."""
        for end, rearranged in self.rearrange.items():
            if key.endswith(end):
                return rearranged(model, tensor)
        return tensor


def interleaved_halves(heads: Callable[[ModelConfig], int]) -> Rearrange:
    """Rows of query or key, [n * d, ...], for rotary positions that turn neighbours: llama.cpp's architecture llama.
    transformers turns row i of a head with row i + d/2.
    """

    def rearranged(model: ModelConfig, tensor: Tensor) -> Tensor:
        number, rest = heads(model), tensor.shape[1:]
        return tensor.reshape(number, 2, -1, *rest).swapaxes(1, 2).reshape(tensor.shape)

    return rearranged


def thirds(model: ModelConfig, tensor: Tensor) -> Tensor:
    """All queries, then all keys, then all values. BLOOM and GPT-NeoX have the three of a head together:
    [n * 3 * d, ...].
    """
    parts = tensor.reshape(model.num_attention_heads, 3, -1, *tensor.shape[1:])
    return torch.cat([parts[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])


def transposed(model: ModelConfig, tensor: Tensor) -> Tensor:
    """[out, in] from the [in, out] of GPT-2's files."""
    return tensor.T


def plus_one(model: ModelConfig, tensor: Tensor) -> Tensor:
    """A norm's weight that multiplies, from the difference to 1 of Gemma's files. The sum is rounded in fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1


def _heads(model: ModelConfig) -> int:
    return model.num_attention_heads


def _turned(model: ModelConfig) -> int:
    return settings_of_model(model).turned(head_dim(model))


COMMON: Mapping[str, Callable[[ModelConfig], Any]] = MappingProxyType(
    {
        "context_length": max_positions,
        "embedding_length": lambda model: model.hidden_size,
        "block_count": lambda model: model.num_layers,
        "feed_forward_length": ffn_width,
        "head_count": _heads,
        "vocab_size": lambda model: model.vocab_size,  # which llama.cpp needs where a file has no tokenizer
    }
)
"""The metadata of every architecture."""
_LAYERNORM = {"layer_norm_eps": lambda model: model.norm_epsilon}
_ROTARY: dict[str, Callable[[ModelConfig], Any]] = {
    "head_count_kv": query_groups,
    "layer_norm_rms_eps": lambda model: model.norm_epsilon,
    "rope_freq_base": lambda model: model.rotary_base,
    "rope_dimension_count": _turned,
    "key_length": head_dim,
    "value_length": head_dim,
}
_PERMUTED = {
    f".{projection}_proj.{kind}": interleaved_halves(heads)
    for projection, heads in (("q", _heads), ("k", query_groups))
    for kind in ("weight", "bias")
}
_DIVIDED = scalings("linear", "yarn", "llama3", "longrope")
"""Of architectures that read tensors of divisors."""
_SCALED = scalings("linear", "yarn")
_GEMMA = {**_ROTARY, "sliding_window": lambda model: only_window(pattern_items(model))}
_GEMMA_NEEDS = (GEGLU_TANH, NO_ATTENTION_BIAS, *scalings("linear"))

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("LLAMA", _ROTARY, _PERMUTED, needs=(*_DIVIDED, NO_WINDOW)),
        "mistral": Architecture("LLAMA", _ROTARY, _PERMUTED, needs=(*_DIVIDED, NO_WINDOW)),
        "gpt2": Architecture(
            "GPT2",
            _LAYERNORM,
            {f".{name}.weight": transposed for name in ("c_attn", "c_proj", "c_fc")},
            needs=(TANH,),
        ),
        "bloom": Architecture(
            "BLOOM",
            {"head_count_kv": _heads} | _LAYERNORM,
            {f".query_key_value.{kind}": thirds for kind in ("weight", "bias")},
            prefix="transformer.",
        ),
        "qwen2": Architecture("QWEN2", _ROTARY, needs=(*_SCALED, NO_WINDOW)),
        "qwen3": Architecture("QWEN3", _ROTARY, needs=(*_SCALED, NO_WINDOW, NO_ATTENTION_BIAS)),
        "gemma2": Architecture(
            "GEMMA2",
            {
                **_GEMMA,
                "attn_logit_softcapping": lambda model: model.attention_cap,
                "final_logit_softcapping": lambda model: model.logits_cap,
            },
            {"norm.weight": plus_one},
            needs=(*_GEMMA_NEEDS, windows_but(2), head_scale(46), is_number("attention_cap"), is_number("logits_cap")),
        ),
        "gemma3_text": Architecture(
            "GEMMA3",
            _GEMMA,
            {"norm.weight": plus_one},
            needs=(*_GEMMA_NEEDS, windows_but(6), LOCAL_BASE, head_scale(62), is_none("logits_cap")),
        ),
        "olmo2": Architecture("OLMO2", _ROTARY, needs=(*_SCALED, NO_WINDOW, NO_ATTENTION_BIAS, UNTIED)),
        "phi3": Architecture(
            "PHI3",
            {**_ROTARY, "sliding_window": lambda model: 0},  # without the key versions before 2025-05 open no file
            needs=(NO_WINDOW,),
        ),
        "smollm3": Architecture(
            "SMOLLM3",
            _ROTARY,
            _PERMUTED,
            needs=(*_SCALED, NO_WINDOW, positions_but(4), NO_ATTENTION_BIAS, NO_MLP_BIAS),
        ),
        "granite": Architecture(
            "GRANITE",
            {
                **_ROTARY,
                "embedding_scale": lambda model: model.embedding_multiplier,
                "residual_scale": lambda model: model.residual_multiplier,
                "attention_scale": attention_scale,
                "logit_scale": lambda model: 1 / model.logits_multiplier,  # by which logits are divided
            },
            _PERMUTED,
            needs=(*_DIVIDED, NO_WINDOW),
        ),
        "gpt_neox": Architecture(
            "GPTNEOX",
            {
                **{key: _ROTARY[key] for key in ("rope_freq_base", "rope_dimension_count")},
                **_LAYERNORM,
                "parallel_residual": lambda model: model.parallel_block != "off",
            },
            {f".query_key_value.{kind}": thirds for kind in ("weight", "bias")},
            needs=(*_SCALED, UNTIED, ATTENTION_BIAS, GELU),
            nearly=(TANH,),  # Pythia has gelu, and llama.cpp nothing but gelu-tanh
        ),
    }
)
"""model_type of a family (`hf.families`) -> its architecture."""
