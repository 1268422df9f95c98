"""The arguments and other facts that Megatron-DeepSpeed stores with a model, for a model of megazero."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megazero.config.derive import (
    attention_bias,
    ffn_width,
    head_dim,
    max_positions,
    mlp_bias,
    padded_vocab,
    query_groups,
)
from megazero.config.inventory import TABLES, tp_axis
from megazero.config.model_shape import newer_settings
from megazero.config.schema import ModelConfig, Run
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron_deepspeed.stages import WritePlan, WrittenTensor
from megazero.convert.source import ConversionError, SourcePosition

_POSITIONS = {"learned": "learned_absolute", "rotary": "rotary", "alibi": "alibi"}
_ACTIVATIONS = ("gelu", "gelu-tanh", "swiglu")


def arguments(run: Run, position: SourcePosition, options: TargetOptions) -> dict[str, Any]:
    """The arguments with which Megatron-DeepSpeed would train this model, as plain values without members of its
    enumerations.

    Raises ConversionError for a model that it does not have.
    """
    model, optimizer = run.model, run.optimizer
    problems = list(_foreign(model))
    if problems:
        raise ConversionError("this model cannot be written for Megatron-DeepSpeed: " + "; ".join(problems))
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": query_groups(model),
        "kv_channels": head_dim(model),
        "ffn_hidden_size": ffn_width(model),
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab(model, options.tp),
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "seq_length": model.seq_length,
        "max_position_embeddings": max_positions(model),
        "position_embedding_type": _POSITIONS[model.position_embedding],
        "use_rotary_position_embeddings": model.position_embedding == "rotary",
        "rotary_base": model.rotary_base,
        "embed_layernorm": model.embedding_layernorm,
        "normalization": model.norm,
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "openai_gelu": False,
        "bias_gelu_fusion": model.activation == "gelu-tanh",
        "add_bias_linear": mlp_bias(model),
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "data_parallel_size": options.dp,
        "fp16": optimizer.precision == "fp16",
        "bf16": optimizer.precision == "bf16",
        "seed": run.data.seed,
        "iteration": position.iteration,
        "consumed_train_samples": position.consumed_samples,
        "consumed_train_tokens": position.consumed_tokens,
        "micro_batch_size": run.schedule.micro_batch_size,
        "global_batch_size": run.schedule.global_batch_size,
        "lr": run.schedule.lr,
        "min_lr": run.schedule.min_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
    }


def _foreign(model: ModelConfig) -> Iterator[str]:
    if model.activation not in _ACTIVATIONS:
        yield f"--activation {model.activation} (it has {', '.join(_ACTIVATIONS)})"
    if model.position_embedding not in _POSITIONS:
        yield f"--position-embedding {model.position_embedding} (it has {', '.join(_POSITIONS)})"
    yield from newer_settings(model)
    if model.position_offset:
        yield f"--position-offset {model.position_offset}"
    if attention_bias(model) != mlp_bias(model):
        yield "biases in the attention and none in the feed-forward part, or the other way round"
    if model.activation == "gelu-tanh" and not mlp_bias(model):
        yield "--activation gelu-tanh without biases (its fused kernel adds one)"
    if head_dim(model) * model.num_attention_heads != model.hidden_size:
        yield (
            f"--kv-channels {head_dim(model)} x {model.num_attention_heads} heads with --hidden-size "
            f"{model.hidden_size}"
        )


def universal_info(planned: WritePlan) -> dict[str, Any]:
    """The patterns of parameter names that DeepSpeed's ds_to_universal needs: how tp ranks and pipeline stages share
    each parameter.
    """

    def patterns(chosen: list[WrittenTensor]) -> list[str]:
        return sorted({_pattern(planned.parameter(written)) for written in chosen})

    tensors = planned.tensors
    embedding = [written for written in tensors if written.where.layer == planned.layers.embedding]
    gated = [written for written in tensors if len(written.names) > 1]
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": planned.model.vocab_size,
        "padded_vocab_size": planned.rows,
        "vocabulary_parameter_patterns": patterns([written for written in tensors if written.names[0] in TABLES]),
        "pipeline_replicated_parameter_patterns": patterns(embedding if planned.layers.tied else []),
        "tp_replicated_parameter_patterns": patterns(
            [written for written in tensors if tp_axis(written.names[0]) is None]
        ),
        "parameter_with_row_parallelism_patterns": patterns(
            [written for written in tensors if tp_axis(written.names[0]) == 1]
        ),
        "parameter_with_2_sub_params_cat_dim_0": patterns(gated),
    }


def _pattern(parameter: str) -> str:
    """A pattern for one parameter of all blocks."""
    number, _, key = parameter.partition(".")
    return rf"^\d+\.{re.escape(key)}$" if number.isdecimal() and "." in key else rf"^{re.escape(parameter)}$"
