"""Random `transformers` models of every family, saved; and the same in float64.

transformers is imported where it is used: collecting the tests takes a second less.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def config_of(case: Case) -> Any:
    transformers = pytest.importorskip("transformers")

    ends = {} if case.kind == "gpt2" else {"eos_token_id": 7}
    return transformers.AutoConfig.for_model(case.kind, **ends | dict(case.config))


def random_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Random values everywhere: biases and norms of a fresh model are zero and one, and OPT's padding row is zero,
    which hides mistakes.
    """
    transformers = pytest.importorskip("transformers")

    assert torch.get_default_dtype() == torch.float32, "another default draws other numbers"
    model = transformers.AutoModelForCausalLM.from_config(config_of(case), attn_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter if parameter.dim() == 1 else 0.0) + 0.2 * bell(parameter.shape, generator))
    return model.to(dtype).eval()


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
