"""LLaMA (Touvron et al. 2023): rotary positions, RMSNorm, gated feed-forward, grouped queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.config.derive import attention_bias, ffn_width, head_dim, mlp_bias, query_groups
from megazero.config.options import run_options
from megazero.config.schema import ModelConfig
from megazero.convert.hf.rules import EMBEDDING, HEAD, Names, Rule, pair, separate
from megazero.convert.hf.shared import ANY, NO_EMBEDDING_NORM, nominal_length, windows
from megazero.convert.hf.tables import Config, ConfigKey, Family, ModelRequirement, one_of, opposite, plain

NAMES = Names(
    "model.",
    (
        Rule(EMBEDDING, ("embed_tokens.weight",)),
        Rule("blocks.{i}.attention_norm.weight", ("layers.{i}.input_layernorm.weight",)),
        *separate("layers.{i}.self_attn"),
        *pair("blocks.{i}.attention.output", "layers.{i}.self_attn.o_proj"),
        Rule("blocks.{i}.mlp_norm.weight", ("layers.{i}.post_attention_layernorm.weight",)),
        *pair("blocks.{i}.mlp.gate", "layers.{i}.mlp.gate_proj"),
        *pair("blocks.{i}.mlp.up", "layers.{i}.mlp.up_proj"),
        *pair("blocks.{i}.mlp.down", "layers.{i}.mlp.down_proj"),
        Rule("head.norm.weight", ("norm.weight",)),
        Rule("head.weight", (HEAD,)),
    ),
)
_GATED = {"silu": "swiglu", "swish": "swiglu"}
_THETA = 10000.0


def _rope(config: Config) -> Mapping[str, Any]:
    """Everything that config.json says about rotary positions, under the names of newer versions of transformers."""
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    for key in ("rope_theta", "partial_rotary_factor"):
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    return found


def _theta_fields(found: Any) -> dict[str, Any]:
    return {"rotary_base": run_options()["rotary_base"].from_value(found)}


class _Theta(ConfigKey):
    """rope_theta, which config.json may have at the top, in rope_parameters or in rope_scaling."""

    def read(self, config: Config) -> Any:
        return _rope(config).get("rope_theta") or self.default

    def entries(self, model: ModelConfig) -> dict[str, Any]:
        """Written both in rope_parameters, for newer versions of transformers, and at the top, for older ones."""
        return {
            "rope_theta": model.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        }


def _problems(config: Config) -> Iterator[str]:
    yield from windows(config)
    rope = _rope(config)
    kind = rope.get("rope_type") or "default"
    plain_linear = kind == "linear" and rope.get("factor") == 1
    if kind != "default" and not plain_linear:
        yield (
            f"rope_type {kind!r} (rope_scaling, rope_parameters): megazero turns by position / theta^(2i/d), which "
            "is 'default'"
        )
    if any(isinstance(value, dict) for value in rope.values()):
        yield f"rope_parameters of several kinds of layers ({', '.join(sorted(rope))}): all layers turn alike here"
    if rope.get("partial_rotary_factor") not in (None, 1):
        yield f"partial_rotary_factor {rope['partial_rotary_factor']!r}: heads are turned as a whole"
    yield from _two_minds(config)


def _two_minds(config: Config) -> Iterator[str]:
    """Contradictions between rope_theta, rope_scaling and rope_parameters. Versions of transformers differ in which of
    them they use.
    """
    older, newer = dict(config.get("rope_scaling") or {}), dict(config.get("rope_parameters") or {})
    for found in (older, newer):
        if found:
            found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    for key in sorted(older.keys() & newer.keys()):
        if older[key] != newer[key]:
            yield f"rope_scaling.{key} is {older[key]!r}, rope_parameters.{key} {newer[key]!r}"
    outer = config.get("rope_theta")
    for name, found in (("rope_scaling", older), ("rope_parameters", newer)):
        if None not in (outer, found.get("rope_theta")) and outer != found["rope_theta"]:
            yield f"rope_theta is {outer!r}, {name}.rope_theta {found['rope_theta']!r}"


def _bias(field: str, key: str) -> ConfigKey:
    value = attention_bias if field == "attention_bias" else mlp_bias
    return ConfigKey((key,), False, lambda found: {field: run_options()[field].from_value(found)}, value)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    NAMES,
    {"position_embedding": "rotary", "embedding_layernorm": False, "norm": "rmsnorm", "hidden_dropout": 0.0},
    (
        plain("vocab_size", 32000, "vocab_size"),
        plain("hidden_size", 4096, "hidden_size"),
        plain("ffn_hidden_size", 11008, "intermediate_size", value=ffn_width),
        plain("num_layers", 32, "num_hidden_layers"),
        plain("num_attention_heads", 32, "num_attention_heads"),
        plain("num_query_groups", None, "num_key_value_heads", value=query_groups),
        plain("kv_channels", None, "head_dim", value=head_dim),
        one_of("activation", "silu", _GATED, "hidden_act"),
        nominal_length(2048, "max_position_embeddings"),
        plain("norm_epsilon", 1e-6, "rms_norm_eps"),
        plain("init_method_std", 0.02, "initializer_range"),
        plain("attention_dropout", 0.0, "attention_dropout"),
        _bias("attention_bias", "attention_bias"),
        _bias("mlp_bias", "mlp_bias"),
        _Theta(
            ("rope_theta", "rope_parameters", "rope_scaling"), _THETA, _theta_fields, lambda model: model.rotary_base
        ),
        opposite("untie_embeddings_and_output_weights", False, "tie_word_embeddings"),
    ),
    ANY,
    (
        ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("rotary",)),
        ModelRequirement("--norm", lambda model: model.norm, ("rmsnorm",)),
        ModelRequirement("--activation", lambda model: model.activation, ("swiglu",)),
        NO_EMBEDDING_NORM,
    ),
    eos=2,
    further=_problems,
    unsaid=(ModelRequirement("--hidden-dropout", lambda model: model.hidden_dropout, (0.0,)),),
)
