"""The fields of a model's shape that its weights fix, and checks of a run that starts from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from megazero.config.derive import (
    attention_bias,
    attention_output_bias,
    ffn_width,
    max_positions,
    mlp_bias,
    qkv_bias,
    query_groups,
)
from megazero.config.layers.kinds import ROTARY, pattern_items, uses_positions
from megazero.config.layers.pattern import LayerPattern
from megazero.config.options import build_run, run_options
from megazero.config.rotary import OF_MODEL
from megazero.config.schema import ModelConfig, Run
from megazero.config.source import ConfigSource

PLAIN = (
    *("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "position_embedding", "embedding_layernorm"),
    *("norm", "norm_epsilon", "activation", "untie_embeddings_and_output_weights"),
    *("rotary_sets", "norm_placement", "norm_plus_one", "query_key_norm", "parallel_block"),
    *("attention_scale", "attention_cap", "logits_cap"),
    *("logits_multiplier", "embedding_multiplier", "residual_multiplier"),
)


def _own_head_dim(model: ModelConfig) -> int | None:
    """The head dimension where it is not hidden / heads; else None, whether it is given or derived."""
    size = model.kv_channels
    return size if size is not None and size * model.num_attention_heads != model.hidden_size else None


def _where_they_differ(bias: Callable[[ModelConfig], bool]) -> Callable[[ModelConfig], bool | None]:
    """The bias where attention and the feed-forward part differ; else None, and --disable-bias-linear suffices."""
    return lambda model: bias(model) if attention_bias(model) != mlp_bias(model) else None


def _of_attention(bias: Callable[[ModelConfig], bool]) -> Callable[[ModelConfig], bool | None]:
    """The bias of a projection where it is not that of attention as a whole; else None."""
    return lambda model: bias(model) if bias(model) != attention_bias(model) else None


def _of_rotary(field: str) -> Callable[[ModelConfig], Any]:
    """A field of rotary positions; None in a model without them."""
    return lambda model: getattr(model, field) if uses_positions(model, ROTARY) else None


SHAPE: Mapping[str, Callable[[ModelConfig], Any]] = {
    **{name: attrgetter(name) for name in PLAIN},
    "num_query_groups": query_groups,
    "kv_channels": _own_head_dim,
    "disable_bias_linear": lambda model: not (attention_bias(model) or mlp_bias(model)),
    "attention_bias": _where_they_differ(attention_bias),
    "mlp_bias": _where_they_differ(mlp_bias),
    "ffn_hidden_size": ffn_width,
    "max_position_embeddings": lambda model: max_positions(model) if model.position_embedding == "learned" else None,
    "position_offset": lambda model: model.position_offset if model.position_embedding == "learned" else None,
    "layer_pattern": lambda model: LayerPattern.shortest(pattern_items(model)),
    "qkv_bias": _of_attention(qkv_bias),
    "attention_output_bias": _of_attention(attention_output_bias),
    **{field: _of_rotary(field) for field in OF_MODEL},
}
"""Field of `ModelConfig` -> its value, also where that is derived; None where the model does not use the field."""
NEWER = (
    *("layer_pattern", *(field for field in OF_MODEL if field != "rotary_base"), "rotary_sets", "norm_placement"),
    *("norm_plus_one", "query_key_norm", "parallel_block", "qkv_bias", "attention_output_bias", "attention_scale"),
    *("attention_cap", "logits_cap", "logits_multiplier", "embedding_multiplier", "residual_multiplier"),
)
"""Fields of `SHAPE` that GPT-2, BLOOM, LLaMA and OPT do not need, and checkpoints of older programs cannot say."""
OF_POSITIONS = ("max_position_embeddings", "position_offset", *OF_MODEL)
"""Fields that only some kinds of position embedding use."""


def shape_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields that a model's weights fix, and for learned positions the longest sequence length."""
    settings = {name: value(model) for name, value in SHAPE.items()}
    if model.position_embedding == "learned":
        settings["seq_length"] = max_positions(model)
    return {name: value for name, value in settings.items() if value is not None}


def newer_settings(model: ModelConfig) -> Iterator[str]:
    """The flags of what a model has of `NEWER`, with their values."""
    for name in NEWER:
        value, default = SHAPE[name](model), SHAPE[name](ModelConfig())
        if value is not None and value != default and value != run_options()[name].default:
            yield f"{run_options()[name].flag} {_word(value)}"


def settled(source: ConfigSource, above: Mapping[str, Any]) -> ConfigSource:
    """A checkpoint's source below these settings: its disputed fields are problems where they do not decide them."""
    if {"tokenizer", "tokenizer_path"} & above.keys():  # the end of documents is a token of the checkpoint's
        for name in ("tokenizer", "tokenizer_path", "eod_id"):
            source.settings.pop(name, None)
            source.disputed.pop(name, None)
    for name, sentence in source.disputed.items():
        if above.get(name) is None:
            source.problems.append(sentence)
            source.bad.add(name)
    return source


def contradictions(source: ConfigSource, run: Run, bad: set[str]) -> Iterator[str]:
    """A sentence for each field in which a run differs from the model of the checkpoint that it starts from.

    source: the checkpoint's settings (`shape_settings`). bad: fields that are already reported. The vocabulary may be
    larger with --extend-vocabulary.
    """
    checkpoint = build_run(source.settings).model
    other_positions = checkpoint.position_embedding != run.model.position_embedding
    for name, value in SHAPE.items():
        # fields of positions differ with the kind of positions, which is one contradiction and not four
        if name == "vocab_size" or name in bad or (other_positions and name in OF_POSITIONS):
            continue
        theirs, ours = value(checkpoint), value(run.model)
        if ours != theirs:
            yield f"{run_options()[name].flag} {_word(ours)}: the model of {source.name} has {_word(theirs)}"
    if "vocab_size" not in bad:
        yield from _vocabulary(source, run)


def _word(value: Any) -> str:
    if value is None or value == ():
        return "none of its own"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _vocabulary(source: ConfigSource, run: Run) -> Iterator[str]:
    theirs, ours, extend = source.settings.get("vocab_size"), run.model.vocab_size, run.checkpoint.extend_vocabulary
    if theirs is None or ours is None:
        return
    if ours < theirs:
        yield f"--vocab-size {ours}: the model of {source.name} has {theirs} tokens, and none can be removed"
    elif ours > theirs and not extend:
        yield (
            f"--vocab-size {ours}: the model of {source.name} has {theirs} tokens; to add {ours - theirs}: "
            "--extend-vocabulary"
        )
    elif ours == theirs and extend:
        yield (
            f"--extend-vocabulary: the model of {source.name} has {theirs} tokens; give the new number with a larger "
            "--vocab-size"
        )
