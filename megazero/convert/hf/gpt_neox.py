"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373): LayerNorm, rotary
positions on a part of each head, attention and the feed-forward layer side by side.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from megazero.config.derive import attention_bias, ffn_width
from megazero.config.options import run_options
from megazero.convert.hf.rope import rope, two_minds
from megazero.convert.hf.rules import EMBEDDING, Names, Rule, pair
from megazero.convert.hf.shared import ACTIVATIONS, ANY, LAYERNORM, NO_EMBEDDING_NORM, nominal_length, windows
from megazero.convert.hf.tables import ConfigKey, Family, ModelRequirement, one_of, opposite, plain

NAMES = Names(
    "gpt_neox.",
    (
        Rule(EMBEDDING, ("embed_in.weight",)),
        *pair("blocks.{i}.attention_norm", "layers.{i}.input_layernorm"),
        *pair("blocks.{i}.attention.qkv", "layers.{i}.attention.query_key_value"),
        *pair("blocks.{i}.attention.output", "layers.{i}.attention.dense"),
        *pair("blocks.{i}.mlp_norm", "layers.{i}.post_attention_layernorm"),
        *pair("blocks.{i}.mlp.up", "layers.{i}.mlp.dense_h_to_4h"),
        *pair("blocks.{i}.mlp.down", "layers.{i}.mlp.dense_4h_to_h"),
        *pair("head.norm", "final_layer_norm"),
        Rule("head.weight", ("embed_out.weight",)),
    ),
    head="embed_out.weight",
)


def _parallel(given: Any) -> dict[str, Any]:
    if not isinstance(given, bool):
        raise ValueError(f"{given!r} is neither true nor false")
    return {"parallel_block": "two-norms" if given else "off"}


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    NAMES,
    {"position_embedding": "rotary", "embedding_layernorm": False, "norm": "layernorm", "mlp_bias": True},
    (
        plain("vocab_size", 50432, "vocab_size"),
        plain("hidden_size", 6144, "hidden_size"),
        plain("ffn_hidden_size", 24576, "intermediate_size", value=ffn_width),
        plain("num_layers", 44, "num_hidden_layers"),
        plain("num_attention_heads", 64, "num_attention_heads"),
        nominal_length(2048, "max_position_embeddings"),
        plain("norm_epsilon", 1e-5, "layer_norm_eps"),
        plain("init_method_std", 0.02, "initializer_range"),
        plain("attention_dropout", 0.0, "attention_dropout"),
        plain("hidden_dropout", 0.0, "hidden_dropout"),
        one_of("activation", "gelu", ACTIVATIONS, "hidden_act"),
        ConfigKey(
            ("attention_bias",),
            True,
            lambda given: {"attention_bias": run_options()["attention_bias"].from_value(given)},
            attention_bias,
        ),
        ConfigKey(("use_parallel_residual",), True, _parallel, lambda model: model.parallel_block != "off"),
        rope(share=0.25, base_key="rotary_emb_base", part_key="rotary_pct", partial=True),
        opposite("untie_embeddings_and_output_weights", False, "tie_word_embeddings"),
    ),
    ANY,
    (
        ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("rotary",)),
        ModelRequirement("--activation", lambda model: model.activation, ("gelu", "gelu-tanh", "relu")),
        *LAYERNORM,
        NO_EMBEDDING_NORM,
    ),
    eos=2,
    also=frozenset(("sliding_window", "layer_types", "use_sliding_window", "rope_theta", "partial_rotary_factor")),
    further=lambda config: chain(windows(config), two_minds(config)),
)
