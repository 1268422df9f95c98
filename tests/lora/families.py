"""Small models of the four families of `transformers`, with random weights everywhere, saved in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.float64 import in_float64

VOCABULARY = 1003
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 36, "n_layer": 2, "n_head": 6, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 40, "tie_word_embeddings": False, "max_position_embeddings": 64},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"ffn_dim": 48, "max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0},
}


def saved_base(family: str, folder: Path, **changes: Any) -> Path:
    """A folder as `save_pretrained` writes it. changes: of the configuration."""
    transformers = pytest.importorskip("transformers")
    with in_float64():
        torch.manual_seed(5)
        config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, **CONFIGS[family])
        config.update(changes)
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
        model.save_pretrained(folder / family)
    return folder / family


def their_base(folder: Path) -> Any:
    """The model as `transformers` opens it, in float64."""
    transformers = pytest.importorskip("transformers")
    with in_float64():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).double().eval()


def with_adapters(model: Any, folder: Path, trained: bool = False) -> Any:
    """PEFT's model of these adapters on a base, which it changes. PEFT is imported here: that takes two seconds."""
    return pytest.importorskip("peft").PeftModel.from_pretrained(model, folder, is_trainable=trained)
