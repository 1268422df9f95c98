"""OPT (Zhang et al. 2022): learned positions behind two rows of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megazero.config.derive import attention_bias, ffn_width
from megazero.config.options import run_options
from megazero.convert.hf.rules import EMBEDDING, HEAD, Names, Rule, pair, separate
from megazero.convert.hf.shared import ACTIVATIONS, ANY, LAYERNORM, NO_EMBEDDING_NORM, biases, learned_length, windows
from megazero.convert.hf.tables import (
    Config,
    ConfigKey,
    Family,
    ModelRequirement,
    SupportedValues,
    one_of,
    opposite,
    plain,
)

NAMES = Names(
    "model.",
    (
        Rule(EMBEDDING, ("decoder.embed_tokens.weight",)),
        Rule("embedding.position.weight", ("decoder.embed_positions.weight",)),
        *pair("blocks.{i}.attention_norm", "decoder.layers.{i}.self_attn_layer_norm"),
        *separate("decoder.layers.{i}.self_attn"),
        *pair("blocks.{i}.attention.output", "decoder.layers.{i}.self_attn.out_proj"),
        *pair("blocks.{i}.mlp_norm", "decoder.layers.{i}.final_layer_norm"),
        *pair("blocks.{i}.mlp.up", "decoder.layers.{i}.fc1"),
        *pair("blocks.{i}.mlp.down", "decoder.layers.{i}.fc2"),
        *pair("head.norm", "decoder.final_layer_norm"),
        Rule("head.weight", (HEAD,)),
    ),
)

OFFSET = 2
"""Rows of the position table before that of position 0. transformers adds 2 to a position and gives padding -1."""


def _problems(config: Config) -> Iterator[str]:
    yield from windows(config)
    width, hidden = config.get("word_embed_proj_dim"), config.get("hidden_size", 768)
    if width is not None and width != hidden:
        yield (
            f"word_embed_proj_dim {width!r}, hidden_size {hidden!r}: embeddings are as wide as the model, there is "
            "no project_in and project_out"
        )


def _enable_bias(found: Any) -> dict[str, Any]:
    return {"disable_bias_linear": not run_options()["disable_bias_linear"].from_value(found)}


def _notes(config: Config) -> Iterator[str]:
    if config.get("layerdrop"):
        yield f"layerdrop {config['layerdrop']}: no layer is left out in training here"


FAMILY = Family(
    "opt",
    "OPTForCausalLM",
    NAMES,
    {
        "position_embedding": "learned",
        "embedding_layernorm": False,
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "position_offset": OFFSET,
    },
    (
        plain("vocab_size", 50272, "vocab_size"),
        plain("hidden_size", 768, "hidden_size"),
        plain("ffn_hidden_size", 3072, "ffn_dim", value=ffn_width),
        plain("num_layers", 12, "num_hidden_layers"),
        plain("num_attention_heads", 12, "num_attention_heads"),
        learned_length(2048, "max_position_embeddings"),
        one_of("activation", "relu", {"relu": "relu"} | ACTIVATIONS, "activation_function"),
        plain("init_method_std", 0.02, "init_std"),
        plain("hidden_dropout", 0.1, "dropout"),
        plain("attention_dropout", 0.0, "attention_dropout"),
        ConfigKey(("enable_bias",), True, _enable_bias, attention_bias),
        opposite("untie_embeddings_and_output_weights", True, "tie_word_embeddings"),
    ),
    (
        *ANY,
        SupportedValues(
            "do_layer_norm_before",
            True,
            (True, None),
            "megazero normalises before a layer, not after it (OPT's 350m is the one that does)",
        ),
        SupportedValues("_remove_final_layer_norm", False, (False, None), "megazero's models end with a normalisation"),
        SupportedValues("layer_norm_elementwise_affine", True, (True, None), "normalisations have weights here"),
    ),
    (
        ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("learned",)),
        ModelRequirement("--position-offset", lambda model: model.position_offset, (OFFSET,)),
        ModelRequirement("--activation", lambda model: model.activation, ("relu", "gelu-tanh", "gelu")),
        ModelRequirement("--norm-epsilon", lambda model: model.norm_epsilon, (1e-5,)),
        NO_EMBEDDING_NORM,
        *LAYERNORM,
        ModelRequirement("biases of linear layers", biases, ("everywhere", "nowhere")),
    ),
    eos=2,
    further=_problems,
    written=lambda model: {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "word_embed_proj_dim": model.hidden_size,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    },
    notes=_notes,
    also=frozenset("word_embed_proj_dim layerdrop activation_dropout activation_fn sliding_window layer_types".split()),
)
