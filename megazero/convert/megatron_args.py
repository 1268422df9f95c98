"""Conversion between the arguments in checkpoints of Megatron-LM and its descendants and a model of megazero.

The source of names and meanings is megatron/training/arguments.py of Megatron-LM, and megatron/arguments.py of the two
Megatron-DeepSpeeds (BigScience's, which trained BLOOM, and Microsoft's). Arguments for features that megazero does not
have are refused by name, all of them in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
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
from megazero.config.model_shape import newer_settings
from megazero.config.schema import ModelConfig, OptimizerConfig, Run
from megazero.config.validate import out_of_range
from megazero.convert.files.unpickle import Record
from megazero.convert.source import ConversionError
from megazero.system.reading import shown

Args = Mapping[str, Any]

POSITIONS: Mapping[Any, str] = {
    "learned_absolute": "learned",
    "absolute": "learned",
    "rope": "rotary",
    "rotary": "rotary",
    "alibi": "alibi",
    "none": "none",
    1: "rotary",
    2: "learned",
    3: "alibi",
}
"""Names, and the numbers of BigScience's enumeration: a pickle stores only the number of a member."""
NORMS: Mapping[str, str] = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}


def _is_set(value: Any) -> bool:
    return value not in (None, False, 0, 0.0, "", [], ())


def _is_not(*plain: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in plain


def _has_experts(value: Any) -> bool:
    counts = value if isinstance(value, (list, tuple)) else [value]
    return any(count not in (None, 0, 1) for count in counts)


UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "num_experts": _has_experts,
    "rotary_percent": _is_not(1, 1.0),
    "rotary_seq_len_interpolation_factor": _is_not(1, 1.0),
    "mtp_num_layers": _is_set,
    "glu_activation": _is_not("none"),
    "softmax_type": _is_not("vanilla"),
    **dict.fromkeys(
        (
            *("apply_layernorm_1p", "apply_residual_connection_post_layernorm", "apply_residual_connection_post_norm"),
            *(
                "qk_layernorm",
                "qk_l2_norm",
                "multi_latent_attention",
                "squared_relu",
                "quick_geglu",
                "rotary_interleaved",
            ),
            *("use_rope_scaling", "window_size", "attention_output_gate", "hybrid_override_pattern", "is_hybrid_model"),
            *(
                "heterogeneous_layers_config_path",
                "heterogeneous_layers_config_encoded_json",
                "no_rope_freq",
                "retro_add_retriever",
            ),
            *(
                "experimental_attention_variant",
                "linear_attention_freq",
                "activation_func_clamp_value",
                "glu_linear_offset",
                "use_mup",
            ),
            *("layernorm_zero_centered_gamma", "softmax_scale"),
        ),
        _is_set,
    ),
}
"""Argument -> whether its value requires a feature that megazero does not have."""


class _Reading:
    """One pass over the arguments, which reads values and collects problems."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.problems: list[str] = []

    def number(self, name: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        value = self.args.get(name)
        if value is None and default is not None:
            return default
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            self.problems.append(f"{name} is {value!r}" if name in self.args else f"{name} is missing")
            return kind(1)

    def choice(self, name: str, table: Mapping[Any, str], default: str) -> str:
        value = self.args.get(name)
        word = word_of(value)
        if value is not None and word not in table:
            self.problems.append(f"{name} {word} is none of {', '.join(map(str, table))}")
        return table.get(word, default) if value is not None else default


def word_of(value: Any) -> Any:
    """The value of an argument. A member of an enumeration gives its value; a word is put into small letters."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    return value.lower() if isinstance(value, str) else value


def model_from_args(args: Args, where: str) -> ModelConfig:
    """The model that the arguments describe. where: the checkpoint, for errors.

    The vocabulary size is the true one if the arguments have it, else that of the padded table. Raises one
    ConversionError with everything that is missing or not supported.
    """
    read = _Reading(args)
    read.problems += [
        f"{name} {word_of(args[name])} is not supported"
        for name, bad in UNSUPPORTED.items()
        if name in args and bad(args[name])
    ]
    heads, hidden = read.number("num_attention_heads", int), read.number("hidden_size", int)
    if heads and args.get("kv_channels") is None and hidden % heads:
        read.problems.append(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and kv_channels is not given"
        )
    model = ModelConfig(
        num_layers=read.number("num_layers", int),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=_groups(args),
        kv_channels=None
        if not heads or args.get("kv_channels") in (None, hidden / heads)
        else int(args["kv_channels"]),
        ffn_hidden_size=read.number("ffn_hidden_size", int, 4 * hidden),
        vocab_size=_vocabulary(read),
        make_vocab_size_divisible_by=read.number("make_vocab_size_divisible_by", int, 128),
        seq_length=read.number("seq_length", int, args.get("max_position_embeddings")),
        max_position_embeddings=args.get("max_position_embeddings"),
        position_embedding=_position(read),
        rotary_base=read.number("rotary_base", float, 10000.0),
        embedding_layernorm=bool(args.get("embed_layernorm")),
        norm=read.choice("normalization", NORMS, "layernorm"),
        norm_epsilon=read.number("layernorm_epsilon", float, args.get("norm_epsilon") or 1e-5),
        activation=_activation(args),
        untie_embeddings_and_output_weights=bool(args.get("untie_embeddings_and_output_weights")),
        disable_bias_linear=args.get("add_bias_linear") is False,
        attention_bias=True if has_qkv_bias_alone(args) else None,
        hidden_dropout=float(args.get("hidden_dropout") or 0.0),
        attention_dropout=float(args.get("attention_dropout") or 0.0),
        init_method_std=float(args.get("init_method_std") or 0.02),
    )
    read.problems += [
        f"{item.name} {shown(value)} {reason}"
        for item in fields(model)
        if (reason := out_of_range(item.name, value := getattr(model, item.name))) is not None
    ]
    if read.problems:
        raise ConversionError(
            f"{where}: the arguments describe a model that cannot be converted: " + "; ".join(read.problems)
        )
    return model


def has_qkv_bias_alone(args: Args) -> bool:
    """Whether query, key and value have a bias and no other linear layer has one."""
    return args.get("add_bias_linear") is False and bool(args.get("add_qkv_bias"))


def _groups(args: Args) -> int | None:
    """The number of key-value heads. Megatron-LM stores a number of groups (1) even where --group-query-attention was
    not given.
    """
    heads = args.get("num_attention_heads")
    grouped = args.get("num_query_groups") if args.get("group_query_attention") else args.get("num_key_value_heads")
    return None if grouped in (None, heads) else int(grouped)


def true_vocabulary(args: Args) -> int | None:
    """The number of tokens without padding, where the arguments say it.

    Megatron's NullTokenizer has one token more than --vocab-size, for the end of a document.
    """
    named = args.get("vocab_size")
    return int(named) + str(args.get("tokenizer_type") or "").startswith("Null") if named else None


def _vocabulary(read: _Reading) -> int:
    padded, true = read.args.get("padded_vocab_size"), true_vocabulary(read.args)
    if true and padded and true > padded:
        read.problems.append(f"vocab_size {true} is more than padded_vocab_size {padded}")
    return true or int(read.number("padded_vocab_size", int))


def _position(read: _Reading) -> str:
    if read.args.get("use_rotary_position_embeddings"):
        return "rotary"
    if read.args.get("add_position_embedding") is False and read.args.get("position_embedding_type") is None:
        return "none"
    return read.choice("position_embedding_type", POSITIONS, "learned")


def _activation(args: Args) -> str:
    """Megatron's GELU is the tanh approximation in its fused kernel, and torch's exact one without that kernel."""
    if args.get("swiglu"):
        return "swiglu"
    if args.get("openai_gelu") or args.get("bias_gelu_fusion", True):
        return "gelu-tanh"
    return "gelu"


def run_from_args(args: Args, model: ModelConfig, precision: str) -> Run:
    """A run with this model and precision, and the optimizer and schedule settings that the arguments have."""
    optimizer: dict[str, Any] = {name: float(args[name]) for name in _OPTIMIZER if args.get(name) is not None}
    schedule: dict[str, Any] = {
        name: kind(args[name]) for name, kind in _SCHEDULE.items() if args.get(name) is not None
    }
    known = Run(model=model, optimizer=OptimizerConfig(precision=precision))
    return replace(known, optimizer=replace(known.optimizer, **optimizer), schedule=replace(known.schedule, **schedule))


_OPTIMIZER = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_SCHEDULE: Mapping[str, Callable[[Any], Any]] = {
    "micro_batch_size": int,
    "global_batch_size": int,
    "lr": float,
    "min_lr": float,
}


POSITIONS_WRITTEN: Mapping[str, str] = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
_GELU: Mapping[str, bool] = {"gelu": False, "gelu-tanh": True, "swiglu": False}


def args_of(run: Run, *, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Megatron-LM's arguments for a model of megazero, written for tp x pp ranks.

    Raises one ConversionError with every setting that Megatron-LM does not have.
    """
    model = run.model
    problems = [f"{what} is nothing that Megatron-LM has" for what, bad in _foreign(model).items() if bad]
    if problems:
        raise ConversionError("this model cannot be written for Megatron-LM: " + "; ".join(problems))
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": query_groups(model) != model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "kv_channels": head_dim(model),
        "ffn_hidden_size": ffn_width(model),
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab(model, tp),
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "seq_length": model.seq_length,
        "max_position_embeddings": max_positions(model),
        "position_embedding_type": POSITIONS_WRITTEN[model.position_embedding],
        "rotary_base": int(model.rotary_base) if model.rotary_base.is_integer() else model.rotary_base,
        "rotary_percent": 1.0,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "bias_gelu_fusion": _GELU[model.activation],
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "add_bias_linear": mlp_bias(model),
        "add_qkv_bias": False,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_experts": None,
        "fp16": run.optimizer.precision == "fp16",
        "bf16": run.optimizer.precision == "bf16",
    }


def _foreign(model: ModelConfig) -> dict[str, bool]:
    return {
        f"--activation {model.activation}": model.activation not in _GELU,
        "--position-embedding alibi": model.position_embedding == "alibi",
        "--embed-layernorm": model.embedding_layernorm,
        "--activation gelu-tanh without biases": model.activation == "gelu-tanh" and not mlp_bias(model),
        "biases in attention alone, or in the feed-forward layers alone,": attention_bias(model) != mlp_bias(model),
        f"--position-offset {model.position_offset}": model.position_offset != 0,
        **dict.fromkeys(newer_settings(model), True),
    }
