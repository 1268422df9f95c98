"""BLOOM (BigScience): ALiBi positions, LayerNorm after the embedding."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.derive import ffn_width
from megazero.convert.hf.rules import EMBEDDING, HEAD, Names, Rule, pair
from megazero.convert.hf.shared import ANY, BIASED, LAYERNORM, nominal_length, windows
from megazero.convert.hf.tables import Config, Family, ModelRequirement, SupportedValues, opposite, plain

NAMES = Names(
    "transformer.",
    (
        Rule(EMBEDDING, ("word_embeddings.weight",)),
        *pair("embedding.norm", "word_embeddings_layernorm"),
        *pair("blocks.{i}.attention_norm", "h.{i}.input_layernorm"),
        *pair("blocks.{i}.attention.qkv", "h.{i}.self_attention.query_key_value"),
        *pair("blocks.{i}.attention.output", "h.{i}.self_attention.dense"),
        *pair("blocks.{i}.mlp_norm", "h.{i}.post_attention_layernorm"),
        *pair("blocks.{i}.mlp.up", "h.{i}.mlp.dense_h_to_4h"),
        *pair("blocks.{i}.mlp.down", "h.{i}.mlp.dense_4h_to_h"),
        *pair("head.norm", "ln_f"),
        Rule("head.weight", (HEAD,)),
    ),
)


def _problems(config: Config) -> Iterator[str]:
    yield from windows(config)
    parts = config.get("pretraining_tp")
    if config.get("slow_but_exact") and parts not in (None, 1):
        yield (
            f"slow_but_exact with pretraining_tp {parts!r}: transformers then leaves out two biases of every layer, "
            "which the model was trained with; set slow_but_exact to false"
        )


FAMILY = Family(
    "bloom",
    "BloomForCausalLM",
    NAMES,
    {"position_embedding": "alibi", "embedding_layernorm": True, "norm": "layernorm", "activation": "gelu-tanh"},
    (
        plain("vocab_size", 250880, "vocab_size"),
        plain("hidden_size", 64, "hidden_size", "n_embed"),
        plain("num_layers", 2, "n_layer", "num_hidden_layers"),
        plain("num_attention_heads", 8, "n_head", "num_attention_heads"),
        nominal_length(2048, "seq_length"),
        plain("norm_epsilon", 1e-5, "layer_norm_epsilon"),
        plain("init_method_std", 0.02, "initializer_range"),
        plain("hidden_dropout", 0.0, "hidden_dropout"),
        plain("attention_dropout", 0.0, "attention_dropout"),
        opposite("untie_embeddings_and_output_weights", True, "tie_word_embeddings"),
    ),
    (
        *ANY,
        SupportedValues(
            "apply_residual_connection_post_layernorm",
            False,
            (False, None),
            "megazero adds to what came before the normalisation",
        ),
    ),
    (
        ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("alibi",)),
        ModelRequirement(
            "LayerNorm after the embedding (--embedding-layernorm)", lambda model: model.embedding_layernorm, (True,)
        ),
        ModelRequirement("--activation", lambda model: model.activation, ("gelu-tanh",)),
        ModelRequirement(
            "--ffn-hidden-size / --hidden-size", lambda model: ffn_width(model) / model.hidden_size, (4.0,)
        ),
        *LAYERNORM,
        BIASED,
    ),
    eos=2,
    also=frozenset(
        """pretraining_tp slow_but_exact seq_length n_inner offset_alibi skip_bias_add skip_bias_add_qkv
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion sliding_window layer_types""".split()
    ),
    further=_problems,
    written=lambda model: {
        "apply_residual_connection_post_layernorm": False,
        "pretraining_tp": 1,
        "slow_but_exact": False,
    },
)
