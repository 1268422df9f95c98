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

from megazero.config.derive import ffn_width, head_dim, max_positions, query_groups
from megazero.config.schema import ModelConfig
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
    """

    name: str
    metadata: Mapping[str, Callable[[ModelConfig], Any]]
    rearrange: Mapping[str, Rearrange] = field(default_factory=dict)
    prefix: str = ""
    needs: tuple[ModelRequirement, ...] = ()

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
    """All queries, then all keys, then all values. BLOOM has the three of a head together: [n * 3 * d, ...]."""
    parts = tensor.reshape(model.num_attention_heads, 3, -1, *tensor.shape[1:])
    return torch.cat([parts[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])


def transposed(model: ModelConfig, tensor: Tensor) -> Tensor:
    """[out, in] from the [in, out] of GPT-2's files."""
    return tensor.T


def _heads(model: ModelConfig) -> int:
    return model.num_attention_heads


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
    "rope_dimension_count": head_dim,
    "key_length": head_dim,
    "value_length": head_dim,
}
_PERMUTED = {
    f".{projection}_proj.{kind}": interleaved_halves(heads)
    for projection, heads in (("q", _heads), ("k", query_groups))
    for kind in ("weight", "bias")
}
_TANH = ModelRequirement("--activation", lambda model: model.activation, ("gelu-tanh",))

_PLAIN_ROTARY = (
    ModelRequirement("--rotary-scaling", lambda model: str(model.rotary_scaling), ("None",)),
    ModelRequirement("--rotary-share", lambda model: model.rotary_share, (1.0,)),
    ModelRequirement("--layer-pattern", lambda model: str(model.layer_pattern), ("None",)),
)
"""What the architecture llama does not compute, or what is not written for it here: scaled positions and windows."""

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("LLAMA", _ROTARY, _PERMUTED, needs=_PLAIN_ROTARY),
        "mistral": Architecture("LLAMA", _ROTARY, _PERMUTED, needs=_PLAIN_ROTARY),
        "gpt2": Architecture(
            "GPT2",
            _LAYERNORM,
            {f".{name}.weight": transposed for name in ("c_attn", "c_proj", "c_fc")},
            needs=(_TANH,),
        ),
        "bloom": Architecture(
            "BLOOM",
            {"head_count_kv": _heads} | _LAYERNORM,
            {f".query_key_value.{kind}": thirds for kind in ("weight", "bias")},
            prefix="transformer.",
        ),
    }
)
"""model_type of a family (`hf.families`) -> its architecture."""
