"""Adapters that PEFT itself has made and saved open like any checkpoint: merged with their model, whatever layers they
are of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.convert.registry import open_source, recognise
from megazero.convert.source import ConversionError
from tests.lora.families import saved_base, their_base, with_adapters
from tests.parity.float64 import in_float64

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, query and value": ("llama", {"r": 3, "target_modules": ["q_proj", "v_proj"]}),
    "llama, every layer": ("llama", {"r": 2, "lora_alpha": 5, "target_modules": "all-linear"}),
    "llama, ranks of their own": (
        "llama",
        {"r": 2, "target_modules": ["k_proj", "up_proj"], "rank_pattern": {"k_proj": 5}},
    ),
    "opt, by the root of the rank": (
        "opt",
        {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "fc2"]},
    ),
    "gpt2": ("gpt2", {"r": 3, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    "bloom": ("bloom", {"r": 3, "target_modules": ["query_key_value"]}),
}


def made(family: str, settings: dict[str, Any], folder: Path) -> Path:
    """A random adapter, as PEFT saves it."""
    peft, base = pytest.importorskip("peft"), saved_base(family, folder)
    with in_float64():
        torch.manual_seed(3)
        model = peft.get_peft_model(
            their_base(base), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        )
        model.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    adapter = made(family, settings, tmp_path)
    assert recognise(adapter) == "peft"
    ids = torch.randint(1003, (2, 12), generator=torch.Generator().manual_seed(1))
    with in_float64(), torch.no_grad():
        base = their_base(tmp_path / family)
        before = base(ids).logits
        theirs = with_adapters(base, adapter)(ids).logits
    ours = megazero.load(adapter, precision="fp64")(ids)
    assert (theirs - before).abs().max() > 1e-3 * theirs.abs().max(), "the adapters change nothing"
    assert (ours - theirs).abs().max() < (1e-6 if family == "bloom" else 1e-10) * theirs.abs().max()


def test_what_is_more_than_low_rank_is_refused(tmp_path: Path) -> None:
    settings = CASES["llama, query and value"][1]
    with pytest.raises(ConversionError, match=r"use_dora True.*plain LoRA"):
        open_source(made("llama", settings | {"use_dora": True}, tmp_path / "dora"))
    with pytest.raises(ConversionError, match=r"adapters of what the model has not: base_model\.model\.lm_head"):
        open_source(made("llama", settings | {"target_modules": ["q_proj", "lm_head"]}, tmp_path / "head"))
    whole = made("llama", settings, tmp_path / "gone")
    config = json.loads((whole / "adapter_config.json").read_text())
    (whole / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/somewhere"}))
    with pytest.raises(ConversionError, match="holds adapters of the model in someone/somewhere, which is not there"):
        open_source(whole)
