"""Small models of the four families of `transformers`, with random weights everywhere, saved in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.float64 import in_float64

transformers = pytest.importorskip("transformers")
VOCABULARY = 1003

CONFIGS: dict[str, Any] = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=36, n_layer=2, n_head=6, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=40,
        tie_word_embeddings=False,
        max_position_embeddings=64,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
    ),
}


def saved_base(family: str, folder: Path, **changes: Any) -> Path:
    """A folder as `save_pretrained` writes it. changes: of the configuration."""
    with in_float64():
        torch.manual_seed(5)
        config = CONFIGS[family]()
        config.update(changes)
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
        model.save_pretrained(folder / family)
    return folder / family


def their_base(folder: Path) -> Any:
    """The model as `transformers` opens it, in float64."""
    with in_float64():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).double().eval()
