"""Random `transformers` models of every family, saved; and the same in float64.

transformers is imported where it is used: collecting the tests takes a second less.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numbers import bell
from tests.parity.float64 import in_float64

VOCABULARY = 93


@dataclass(frozen=True)
class Case:
    """tps: sizes that divide the heads. tolerance: of logits in float64; BLOOM's constant inside GELU is rounded to
    eight digits over there.
    """

    kind: str
    tps: tuple[int, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12


_BLOOM = {"n_layer": 4, "vocab_size": VOCABULARY}
_GPT2 = {"n_layer": 4, "n_embd": 48, "n_head": 4, "n_positions": 24, "vocab_size": VOCABULARY}
_GPT2 |= {"eos_token_id": 5, "bos_token_id": 5}
_NAMED = {"num_hidden_layers": 4, "hidden_size": 48, "vocab_size": VOCABULARY}
_NONE: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None}
_LLAMA = _NAMED | {"intermediate_size": 40, "num_attention_heads": 8}
_OPT = _NAMED | {"ffn_dim": 80, "num_attention_heads": 4, "max_position_embeddings": 24}
CASES = {
    "bloom, 12 heads": Case("bloom", (1, 2, 4), _BLOOM | {"hidden_size": 48, "n_head": 12}, 1e-9),
    "bloom, 6 heads, untied": Case(
        "bloom", (1, 2), _BLOOM | {"hidden_size": 36, "n_head": 6, "tie_word_embeddings": False}, 1e-9
    ),
    "gpt2, inner width": Case("gpt2", (1, 2, 4), _GPT2 | {"n_inner": 100}),
    "gpt2, relu, untied": Case(
        "gpt2", (1, 2, 4), _GPT2 | {"activation_function": "relu", "tie_word_embeddings": False}
    ),
    "llama, grouped": Case(
        "llama",
        (1, 2, 4),
        _LLAMA | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama, tied, own head width": Case(
        "llama",
        (1, 2),
        _LLAMA | {"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama, biases": Case("llama", (1, 2, 4), _LLAMA | {"mlp_bias": True, "rms_norm_eps": 1e-5}),
    "opt": Case("opt", (1, 2, 4), _OPT),
    "opt, gelu, no biases, untied": Case(
        "opt", (1, 2, 4), _OPT | {"activation_function": "gelu", "enable_bias": False, "tie_word_embeddings": False}
    ),
}


_DECODER: dict[str, Any] = _NONE | _NAMED | {"intermediate_size": 42, "hidden_size": 60, "max_position_embeddings": 64}
_DECODER |= {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_NARROW = {key: value for key, value in _DECODER.items() if key != "head_dim"}
_FIVE = {"num_hidden_layers": 5}
_LONG = {"short_factor": [1.0, 1.1, 1.25, 1.5], "long_factor": [1.0, 1.5, 2.0, 4.0], "rope_type": "longrope"}
CASES |= {
    "llama 3, scaled": Case(
        "llama",
        (1, 3),
        _DECODER | {"rope_parameters": _LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}},
    ),
    "qwen 2.5": Case("qwen2", (1, 3), _NARROW),
    "qwen 2.5, windows, tied": Case(
        "qwen2",
        (1, 3),
        _DECODER
        | _FIVE
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen 3": Case("qwen3", (1, 3), _DECODER),
    "qwen 3, yarn, biases, tied": Case(
        "qwen3",
        (1, 3),
        _DECODER
        | {"attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
        | {"max_position_embeddings": 32},
    ),
    "mistral": Case("mistral", (1, 3), _DECODER | {"sliding_window": 4}),
    "mistral nemo": Case("mistral", (1, 3), _DECODER | {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "gemma 2": Case(
        "gemma2",
        (1, 3),
        _DECODER
        | _FIVE
        | {"sliding_window": 4, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma 3": Case(
        "gemma3_text",
        (1, 3),
        _DECODER | {"num_hidden_layers": 7, "sliding_window": 4, "query_pre_attn_scalar": 20},
    ),
    "gemma 3, scaled, untied": Case(
        "gemma3_text",
        (1, 3),
        _DECODER
        | {"num_hidden_layers": 4, "sliding_window": 3, "tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "olmo 2": Case("olmo2", (1, 3), _DECODER),
    "phi 3": Case("phi3", (1, 3), _DECODER | {"sliding_window": 5}),
    "phi 4 mini": Case(
        "phi3",
        (1, 3),
        _NARROW
        | {"tie_word_embeddings": True, "max_position_embeddings": 64, "original_max_position_embeddings": 8}
        | {"rope_parameters": _LONG | {"partial_rotary_factor": 0.8, "rope_theta": 1e4}},
    ),
    "smollm 3": Case("smollm3", (1, 3), _NARROW | _FIVE),
    "smollm 3, windows": Case(
        "smollm3",
        (1, 3),
        _DECODER
        | _FIVE
        | {"no_rope_layers": [1, 0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 4}
        | {"tie_word_embeddings": False},
    ),
    "granite": Case(
        "granite",
        (1, 3),
        _DECODER
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "granite, tied": Case(
        "granite",
        (1, 3),
        _NARROW
        | {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.5}
        | {"tie_word_embeddings": True, "mlp_bias": True},
    ),
    "pythia": Case(
        "gpt_neox",
        (1, 3),
        {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 78}
        | {"vocab_size": VOCABULARY, "max_position_embeddings": 64},
    ),
    "gpt-neox, in turn, tied": Case(
        "gpt_neox",
        (1, 3),
        {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 78}
        | {"vocab_size": VOCABULARY, "use_parallel_residual": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        | {"hidden_act": "gelu_new"},
    ),
}


def config_of(case: Case) -> Any:
    transformers = pytest.importorskip("transformers")

    ends = {} if case.kind == "gpt2" else {"eos_token_id": 7}
    return transformers.AutoConfig.for_model(case.kind, **ends | deepcopy(dict(case.config)))  # it writes into them


def random_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Random values everywhere: biases and norms of a fresh model are zero and one, and OPT's padding row is zero,
    which hides mistakes.
    """
    transformers = pytest.importorskip("transformers")

    assert torch.get_default_dtype() == torch.float32, "another default draws other numbers"
    model = transformers.AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager")
    spread(model)
    return model.to(dtype).eval()


def spread(model: Any) -> None:
    """Give every parameter random values; a vector's stay near what they are."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter if parameter.dim() == 1 else 0.0) + 0.2 * bell(parameter.shape, generator))


def saved(case: Case, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    random_model(case, dtype).save_pretrained(folder, **how)
    return folder


def in_double(case: Case) -> Any:
    """The random model, computing in float64; run it under `in_float64`."""
    transformers = pytest.importorskip("transformers")

    state = {name: tensor.double() for name, tensor in random_model(case).state_dict().items()}
    with in_float64():
        model = (
            transformers.AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager").double().eval()
        )
        model.load_state_dict(state)
    return model


def prompts() -> Tensor:
    """int64 [3, 9]"""
    return torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(6))


def their_answers(case: Case, new: int) -> tuple[Tensor, list[list[int]]]:
    """Logits [b, s, v] in float64, and the tokens that greedy generation adds."""
    ids, model = prompts(), in_double(case)
    with in_float64(), torch.no_grad():
        logits = model(ids).logits
        model.generation_config.eos_token_id = None
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
        )
    assert logits.dtype == torch.float64
    return logits, text[:, ids.shape[1] :].tolist()
