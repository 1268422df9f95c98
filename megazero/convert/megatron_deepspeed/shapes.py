"""The model's settings from the shapes of its tensors, for arguments that are incomplete or missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.convert.megatron_deepspeed.names import Layers
from megazero.convert.megatron_deepspeed.weights import LayerTensor
from megazero.convert.report import ConversionReport
from megazero.convert.source import ConversionError

SEQUENCE = 2048
"""The sequence length if neither arguments nor shapes have it. A model with learned positions depends on it, but its
table's shape has it.
"""


def args_from_shapes(
    said: Mapping[str, Any],
    stored: Mapping[int, tuple[Mapping[str, LayerTensor], ...]],
    layers: Layers,
    where: str,
    report: ConversionReport,
) -> dict[str, Any]:
    """The arguments, completed. Assumptions go into the report.

    Raises ConversionError for facts that no tensor shows, and for contradictions.
    """
    embedding, block = stored[layers.embedding], stored[layers.blocks[0]]
    rows, hidden = _two(embedding, "word_embeddings.weight", where)
    tp = len(block)
    positions = embedding[0].get("position_embeddings.weight")
    biased = "self_attention.query_key_value.bias" in block[0]
    facts = {
        "num_layers": len(layers.blocks),
        "hidden_size": hidden,
        "padded_vocab_size": rows * tp,
        "untie_embeddings_and_output_weights": not layers.tied,
        "embed_layernorm": "word_embeddings.norm.weight" in embedding[0],
        "add_bias_linear": biased,
        "normalization": "LayerNorm" if "input_layernorm.bias" in block[0] else "RMSNorm",
    }
    facts |= _widths(said, block, tp, hidden)
    if positions is not None:
        facts |= {"position_embedding_type": "learned_absolute", "max_position_embeddings": positions.shape[0]}
    _refuse_contradictions(said, facts, where)
    assumed = _assumed(said, facts)
    if said.get("num_attention_heads") is None:
        raise ConversionError(
            f"{where}: the number of attention heads is in no tensor's shape, and the mp_rank files' arguments do not "
            "tell it. Put a config.json "
            f'with {{"num_attention_heads": N}} beside the layer files (and "layer_norm_epsilon", "seq_length" where '
            "they matter)"
        )
    report.notes += [f"{name} is said nowhere: {value} is assumed" for name, value in assumed.items()]
    return {**{name: value for name, value in said.items() if value is not None}, **facts, **assumed}


def _two(ranks: tuple[Mapping[str, LayerTensor], ...], key: str, where: str) -> tuple[int, int]:
    shape = ranks[0][key].shape
    if len(shape) != 2:
        raise ConversionError(f"{where}: {key} has the shape {list(shape)}, a table is expected")
    return shape[0], shape[1]


def _widths(
    said: Mapping[str, Any], block: tuple[Mapping[str, LayerTensor], ...], tp: int, hidden: int
) -> dict[str, Any]:
    """The feed-forward width, and whether the first matrix is two in one (swiglu)."""
    up, down = block[0].get("mlp.dense_h_to_4h.weight"), block[0].get("mlp.dense_4h_to_h.weight")
    if up is None or down is None or len(up.shape) != 2 or len(down.shape) != 2:
        return {}
    width = down.shape[1] * tp
    found: dict[str, Any] = {"ffn_hidden_size": width}
    if up.shape[0] * tp == 2 * width:
        found["swiglu"] = True
    qkv = block[0]["self_attention.query_key_value.weight"].shape[0] * tp
    heads = said.get("num_attention_heads")
    if heads and qkv != 3 * hidden and hidden % heads == 0:
        groups = (qkv - hidden) * heads // (2 * hidden)
        found |= {"group_query_attention": True, "num_query_groups": groups}
    return found


def _refuse_contradictions(said: Mapping[str, Any], facts: Mapping[str, Any], where: str) -> None:
    names = ("num_layers", "hidden_size", "padded_vocab_size", "ffn_hidden_size")

    wrong = [
        f"{name} is {said[name]} by the arguments and {facts[name]} by the tensors"
        for name in names
        if name in facts and said.get(name) not in (None, facts[name])
    ]
    if wrong:
        raise ConversionError(f"{where} does not hold the model that its arguments describe: " + "; ".join(wrong))


def _assumed(said: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that tensors do not show, with the value that most such models have."""
    found: dict[str, Any] = {}
    if said.get("seq_length") is None:
        found["seq_length"] = said.get("max_position_embeddings") or facts.get("max_position_embeddings") or SEQUENCE
    if said.get("layernorm_epsilon") is None and said.get("norm_epsilon") is None:
        found["layernorm_epsilon"] = 1e-5
    rotary = said.get("use_rotary_position_embeddings")
    if not rotary and said.get("position_embedding_type") is None and "position_embedding_type" not in facts:
        found["position_embedding_type"] = "alibi" if facts["embed_layernorm"] else "rotary"
    return found
