"""Adapters that PEFT made for today's families: what is computed with them, and what is written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import megazero
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.native import open_native
from megazero.convert.registry import format_table, open_source
from megazero.convert.verification import verify
from megazero.data.progress import silent
from tests.convert.hf_models import CASES, prompts, saved
from tests.lora.families import their_base, with_adapters
from tests.parity.float64 import in_float64
from tests.parity.training import data_flags, train

TARGETS = {"phi 3": ["qkv_proj", "gate_up_proj", "down_proj"], "pythia": ["query_key_value", "dense_4h_to_h"]}
TODAY = (
    "llama 3, scaled",
    "qwen 2.5, windows, tied",
    "qwen 3",
    "mistral",
    "gemma 2",
    "gemma 3",
    "olmo 2",
    "phi 3",
    "smollm 3",
    "granite",
    "pythia",
)


def made(name: str, folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    """A random adapter of some layers' modules, as PEFT saves it, and its base in the dtype."""
    peft, base = pytest.importorskip("peft"), saved(CASES[name], folder / "base", dtype)
    targets = TARGETS.get(name, ["q_proj", "v_proj", "o_proj", "up_proj"])
    with in_float64():
        torch.manual_seed(3)
        settings = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=targets)
        model = peft.get_peft_model(their_base(base), settings)
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "lora_" in key:
                    value.normal_(0.0, 0.3)
        model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def logits_of_peft(base: Path, adapter: Path) -> torch.Tensor:
    with in_float64(), torch.no_grad():
        logits: torch.Tensor = with_adapters(their_base(base), adapter)(prompts()).logits
    return logits


def shapes(adapter: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", TODAY)
def test_adapters_both_ways(name: str, tmp_path: Path) -> None:
    adapter, again, base = made(name, tmp_path), tmp_path / "again", tmp_path / "base"
    with in_float64(), torch.no_grad():
        before = their_base(base)(prompts()).logits
    theirs = logits_of_peft(base, adapter)
    scale = theirs.abs().max()
    assert (theirs - before).abs().max() > 1e-2 * scale, "the adapters change something"
    assert (megazero.load(adapter, precision="fp64")(prompts()) - theirs).abs().max() < 1e-11 * scale
    with open_source(adapter) as source:
        convert(source, format_table()["peft"], again, TargetOptions(), silent)
        verdict = verify(source, again, "peft", silent)
    assert verdict.holds, verdict.lines
    assert (logits_of_peft(base, again) - theirs).abs().max() < 1e-11 * scale
    assert (megazero.load(again, precision="fp64")(prompts()) - theirs).abs().max() < 1e-11 * scale
    assert shapes(again) == shapes(adapter), "no module gets an adapter that it had not, and ranks stay"


def test_of_a_base_in_16_bits_both_programs_have_the_same_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """PEFT rounds no sum of a weight and its adapter to 16 bits. Nothing is heard of its loading and transformers'."""
    adapter, again = made("qwen 3", tmp_path, torch.bfloat16), tmp_path / "again"
    capfd.readouterr()
    with open_source(adapter) as source:
        convert(source, format_table()["peft"], again, TargetOptions(), silent)
        verdict = verify(source, again, "peft", silent)
    assert verdict.holds and "; PEFT " in " ".join(verdict.lines), verdict.lines
    assert capfd.readouterr() == ("", "")


def test_gate_and_up_have_an_a_each_in_one_module(corpus: Path, tmp_path: Path) -> None:
    """Ours are two layers and Phi-3's are one: rank 6 of two times 3, with the same logits, and ours again."""
    case = replace(CASES["phi 3"], config={**CASES["phi 3"].config, "vocab_size": 1003})
    base, again = saved(case, tmp_path / "base", torch.float64), tmp_path / "again"
    words = f"--precision fp64 --lora-rank 3 --seq-length 12 --global-batch-size 4 --lr 1e-2 --init-from {base}"
    saves = f"--train-iters 3 --save {tmp_path / 'saved'}"
    train(1, [*words.split(), *saves.split(), *data_flags(corpus, tmp_path / "cache")])
    with open_native(tmp_path / "saved") as adapters:
        written = adapters.path / "peft"
    ranks = {key.split(".")[-3]: shape[0] for key, shape in shapes(written).items() if "lora_A" in key}
    assert ranks == {"qkv_proj": 3, "o_proj": 3, "gate_up_proj": 6, "down_proj": 3}
    theirs = logits_of_peft(base, written)
    ours = megazero.load(tmp_path / "saved")(prompts())
    assert (ours - theirs).abs().max() < 1e-11 * theirs.abs().max()
    with open_source(tmp_path / "saved") as source:
        convert(source, format_table()["peft"], again, TargetOptions(), silent)
        verdict = verify(source, again, "peft", silent)
    assert verdict.holds, verdict.lines
    assert (megazero.load(again, precision="fp64")(prompts()) - theirs).abs().max() < 1e-11 * theirs.abs().max()
