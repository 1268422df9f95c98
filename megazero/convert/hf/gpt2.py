"""GPT-2 (Radford et al. 2019): learned positions, linear weights stored [in, out]."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.derive import ffn_width
from megazero.config.schema import ModelConfig
from megazero.convert.hf.rearrange import THIRDS, TRANSPOSED, TRANSPOSED_THIRDS
from megazero.convert.hf.rules import EMBEDDING, HEAD, Names, Rule, pair
from megazero.convert.hf.shared import (
    ACTIVATIONS,
    ANY,
    BIASED,
    LAYERNORM,
    NO_EMBEDDING_NORM,
    copy_of,
    learned_length,
    windows,
)
from megazero.convert.hf.tables import Config, Family, ModelRequirement, SupportedValues, one_of, opposite, plain

NAMES = Names(
    "transformer.",
    (
        Rule(EMBEDDING, ("wte.weight",)),
        Rule("embedding.position.weight", ("wpe.weight",)),
        *pair("blocks.{i}.attention_norm", "h.{i}.ln_1"),
        *pair("blocks.{i}.attention.qkv", "h.{i}.attn.c_attn", TRANSPOSED_THIRDS, THIRDS),
        *pair("blocks.{i}.attention.output", "h.{i}.attn.c_proj", TRANSPOSED),
        *pair("blocks.{i}.mlp_norm", "h.{i}.ln_2"),
        *pair("blocks.{i}.mlp.up", "h.{i}.mlp.c_fc", TRANSPOSED),
        *pair("blocks.{i}.mlp.down", "h.{i}.mlp.c_proj", TRANSPOSED),
        *pair("head.norm", "ln_f"),
        Rule("head.weight", (HEAD,)),
    ),
)
_RESIDUAL_DROPOUT = plain("hidden_dropout", 0.1, "resid_pdrop")


def _inner(model: ModelConfig) -> int | None:
    """The value of n_inner: the feed-forward width, or None for 4h."""
    return None if ffn_width(model) == 4 * model.hidden_size else ffn_width(model)


def _notes(config: Config) -> Iterator[str]:
    inside, after = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if inside != after:
        yield (
            f"embd_pdrop {after} is resid_pdrop {inside} here: megazero has one dropout outside attention (in "
            "training only)"
        )


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    NAMES,
    {"position_embedding": "learned", "embedding_layernorm": False, "norm": "layernorm"},
    (
        plain("vocab_size", 50257, "vocab_size"),
        plain("hidden_size", 768, "n_embd", "hidden_size"),
        plain("num_layers", 12, "n_layer", "num_hidden_layers"),
        plain("num_attention_heads", 12, "n_head", "num_attention_heads"),
        plain("ffn_hidden_size", None, "n_inner", value=_inner),
        learned_length(1024, "n_positions", "max_position_embeddings"),
        one_of("activation", "gelu_new", ACTIVATIONS, "activation_function"),
        plain("norm_epsilon", 1e-5, "layer_norm_epsilon"),
        plain("init_method_std", 0.02, "initializer_range"),
        _RESIDUAL_DROPOUT,
        copy_of(_RESIDUAL_DROPOUT, 0.1, "embd_pdrop"),
        plain("attention_dropout", 0.1, "attn_pdrop"),
        opposite("untie_embeddings_and_output_weights", True, "tie_word_embeddings"),
    ),
    (
        *ANY,
        SupportedValues(
            "scale_attn_weights", True, (True, None), "scores are always divided by the root of a head's width"
        ),
        SupportedValues(
            "scale_attn_by_inverse_layer_idx", False, (False, None), "scores are not divided by the layer's number"
        ),
    ),
    (
        ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("learned",)),
        ModelRequirement("--position-offset", lambda model: model.position_offset, (0,)),
        ModelRequirement("--activation", lambda model: model.activation, ("gelu-tanh", "gelu", "relu")),
        NO_EMBEDDING_NORM,
        *LAYERNORM,
        BIASED,
    ),
    eos=50256,
    further=windows,
    written=lambda model: {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    notes=_notes,
    also=frozenset("n_ctx reorder_and_upcast_attn sliding_window layer_types".split()),
)
