"""Adapters that PEFT itself has made and saved open like any checkpoint: merged with their model, whatever layers they
are of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megazero
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.hf.families import FAMILIES
from megazero.convert.lora.targets import OF_FAMILY, adapter_targets
from megazero.convert.registry import format_table, open_source, recognise
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from megazero.data.progress import silent
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
    "llama, some of its layers": (
        "llama",
        {"r": 4, "lora_alpha": 16, "target_modules": ["v_proj", "down_proj", "q_proj"], "layers_to_transform": [1]},
    ),
    "llama, scales of their own": (
        "llama",
        {
            "r": 2,
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
            "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 3},
            "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.o_proj": 7.5, "up_proj": 1},
        },
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
            their_base(base), peft.LoraConfig(**{"task_type": "CAUSAL_LM", "init_lora_weights": False, **settings})
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


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_written_again(case: str, tmp_path: Path) -> None:
    """Adapters to adapters: PEFT gives the same logits with what is written as with what it wrote, and so do we."""
    family, settings = CASES[case]
    adapter, again = made(family, settings, tmp_path), tmp_path / "again"
    with open_source(adapter) as source:
        convert(source, format_table()["peft"], again, TargetOptions(), silent)
        verdict = verify(source, again, "peft", silent)
    assert verdict.holds, verdict.lines
    ids = torch.randint(1003, (2, 12), generator=torch.Generator().manual_seed(1))
    with in_float64(), torch.no_grad():
        first, second = (with_adapters(their_base(tmp_path / family), path)(ids).logits for path in (adapter, again))
    assert (first - second).abs().max() < 1e-12 * first.abs().max()
    ours = [megazero.load(path, precision="fp64")(ids) for path in (adapter, again)]
    assert (ours[0] - ours[1]).abs().max() < 1e-12 * ours[0].abs().max()
    was, now = (safetensors_keys(path) for path in (adapter, again))
    assert was == now, "no module gets an adapter that it had not, and ranks stay"


def safetensors_keys(adapter: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


HALVES: dict[str, dict[str, Any]] = {
    "an alpha of its own": {"r": 4, "alpha_pattern": {"q_proj": 7, "up_proj": 3}},
    "by the root of the rank": {"r": 3, "use_rslora": True},
    "a large factor": {"r": 4, "lora_alpha": 0.01, "alpha_pattern": {"q_proj": 12}},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", HALVES)
def test_a_factor_of_its_own_rounds_no_half_precision_adapter(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """B times the module's factor has more digits than a half has, and may be larger than one."""
    settings = {"target_modules": ["q_proj", "v_proj", "up_proj"], **HALVES[case]}
    adapter, again, whole = made("llama", settings, tmp_path), tmp_path / "again", tmp_path / "whole"
    file = adapter / "adapter_model.safetensors"
    stored = {key: value * (1e4 if "lora_B" in key else 1e-3) for key, value in load_file(file).items()}
    save_file({key: value.to(dtype) for key, value in stored.items()}, file, {"format": "pt"})
    theirs = in_fp32(tmp_path / "llama", adapter)
    with open_source(adapter) as source:
        convert(source, format_table()["peft"], again, TargetOptions(), silent)
        assert verify(source, again, "peft", silent).holds
        convert(source, format_table()["hf"], whole, TargetOptions(), silent)
    for path in (adapter, again, whole):
        assert (megazero.load(path, precision="fp32")(IDS) - theirs).abs().max() < 1e-5 * theirs.abs().max(), path
    assert (in_fp32(tmp_path / "llama", again) - theirs).abs().max() < 1e-5 * theirs.abs().max()


IDS = torch.randint(1003, (2, 12), generator=torch.Generator().manual_seed(1))


def in_fp32(base: Path, adapter: Path) -> torch.Tensor:
    """PEFT's logits."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = with_adapters(model, adapter).eval()(IDS).logits
    return logits


def test_parts_of_one_layer_have_dtypes_of_their_own(tmp_path: Path) -> None:
    """Query's adapter is in fp16, beside one of value that fp16 does not hold."""
    adapter = made("llama", {"r": 2, "target_modules": ["q_proj", "v_proj"]}, tmp_path)
    file = adapter / "adapter_model.safetensors"
    stored = {key: value.half() if "q_proj" in key else value.float() for key, value in load_file(file).items()}
    for key, value in stored.items():
        stored[key] = value * 1e6 if "v_proj.lora_B" in key else value / 1e6 if "v_proj.lora_A" in key else value
    save_file(stored, file, {"format": "pt"})
    theirs = in_fp32(tmp_path / "llama", adapter)
    assert (megazero.load(adapter, precision="fp32")(IDS) - theirs).abs().max() < 1e-5 * theirs.abs().max()


CHANGES_ITS_BASE: tuple[str, ...] = ("pissa", "pissa_niter_2", "olora", "corda", "loftq", "lora_ga", "of tomorrow")
MORE: tuple[dict[str, Any], ...] = (
    {"alora_invocation_tokens": [1, 2]},
    {"loftq_config": {"loftq_bits": 4}},
    {"modules_to_save": ["lm_head"]},
    {"kasa_config": {"beta": 1}},
    {"key_of_tomorrow": 3},
    {"bias": "all"},
    {"peft_type": "IA3"},
    {"peft_type": None},
    {"task_type": "SEQ_CLS"},
    {"target_modules": 3},
    {"target_modules": [3]},
    {"target_modules": r"(?i)Q_PROJ"},
    {"exclude_modules": {"q_proj": 1}},
    {"layers_to_transform": "0"},
    {"layers_to_transform": True},
    {"layers_pattern": "layers"},
    {"layers_pattern": ["(layers"]},
    {"rank_pattern": [2]},
    {"rank_pattern": {"q_proj": "2"}},
    {"rank_pattern": {"q_proj": 2.0}},
    {"rank_pattern": {"q_proj": 0}},
    {"alpha_pattern": {"(a": 2}},
    {"alpha_pattern": {"q_proj": "2"}},
    {"alpha_pattern": {"q_proj": -2}},
    {"alpha_pattern": [2]},
)


def test_only_what_is_known_to_be_plain_is_read(tmp_path: Path) -> None:
    """Other ways to begin, and every key that nobody knows, with a value that could mean anything."""
    adapter = made("llama", CASES["llama, query and value"][1], tmp_path)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    for change in (*({"init_lora_weights": way} for way in CHANGES_ITS_BASE), *MORE):
        file.write_text(json.dumps(config | change))
        ((key, _),) = change.items()
        with pytest.raises(ConversionError, match=key):
            open_source(adapter)
    plain: tuple[dict[str, Any], ...]
    plain = {"init_lora_weights": "gaussian"}, {"key_of_tomorrow": None}, {"key_of_tomorrow": {}}
    for change in plain:
        file.write_text(json.dumps(config | change))
        open_source(adapter).closing.close()


KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "up_proj", "down_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": []},
    {"target_modules": None},
    {"target_modules": "All-Linear"},
    {"target_modules": r".*_proj"},
    {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(?:[qkvo]|gate|up|down)_proj"},
    {"target_modules": r"^.*?layers.*?(?=self_attn|mlp).*\b[a-z]{1,4}_proj$"},
    {"target_modules": r".*\.(?!q_)\w+_proj"},
    {"target_modules": r"_proj"},
    {"target_modules": r".*", "layers_to_transform": [0, 1]},
    {"exclude_modules": ["q_proj"]},
    {"exclude_modules": ["proj"]},
    {"exclude_modules": r".*q_proj"},
    {"exclude_modules": r"q_proj"},
    {"layers_to_transform": [0]},
    {"layers_to_transform": 1},
    {"layers_to_transform": [1, 0]},
    {"layers_to_transform": []},
    {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    {"layers_to_transform": [0, 1], "layers_pattern": ["blocks", "layers"]},
    {"layers_to_transform": [0, 1], "layers_pattern": "blocks"},
    {"layers_pattern": "layers"},
    {"r": 3},
    {"r": 1},
    {"r": 9, "rank_pattern": {r".*_proj": 2}},
    {"rank_pattern": {"q_proj": 2}},
    {"rank_pattern": {"q_proj": 3}},
    {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3}},
    {"rank_pattern": {"roj": 3}},
    {"rank_pattern": {r"^model.layers.\d.*": 2}, "r": 4},
    {"rank_pattern": {"(q|k)_proj": 4}},
    {"alpha_pattern": {"(q|k)_proj": 40, "self_attn.*": 7}},
    {"alpha_pattern": {r"^model\.layers\.1\..*": 40, "oj": 70}},
    {"task_type": None},
)
"""Keys that say which modules have an adapter, of which rank and scale."""


def test_the_tensors_are_those_that_the_keys_name(tmp_path: Path) -> None:
    """PEFT makes the modules that its keys name, and leaves tensors of others out. We read what it reads whole."""
    adapter = made("llama", {"r": 2, "target_modules": "all-linear"}, tmp_path)
    file, stored = adapter / "adapter_config.json", safetensors_keys(adapter)
    config, read = json.loads(file.read_text()), []
    for change in KEYS:
        file.write_text(json.dumps(config | change))
        try:
            base = their_base(tmp_path / "llama")
            theirs = with_adapters(base, adapter)
            made_there = {
                key.replace(".default", ""): tuple(value.shape)
                for key, value in theirs.named_parameters()
                if "lora_" in key
            }
        except (ValueError, RuntimeError):
            made_there = {}
        if made_there != stored:
            with pytest.raises(ConversionError, match=next(iter(change))):
                open_source(adapter)
            continue
        with in_float64(), torch.no_grad():
            logits = theirs(IDS).logits
        assert (megazero.load(adapter, precision="fp64")(IDS) - logits).abs().max() < 1e-10 * logits.abs().max(), change
        read.append(change)
    assert len(read) == 22 and {} in read


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_of_a_target_modules_that_is_null(family: str) -> None:
    peft = pytest.importorskip("peft.utils.constants")
    theirs = peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(family)
    assert OF_FAMILY.get(family) == (None if theirs is None else tuple(theirs))


def test_an_expression_that_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.convert.lora.targets.SECONDS", 0.01)
    targets = adapter_targets({"target_modules": r"(?:(?:\w|\w\w|\w\w\w)+)(?:\w|\w\w)+\1?(x+x+)+y", "r": 4})
    with pytest.raises(ConversionError, match=r"target_modules .*: whether x+ matches takes more than 0\.01 s"):
        targets.leaves_out("x" * 4000, "llama")
    for wrong in ("(a", "a)", "a**", "[a", "a\\"):
        with pytest.raises(ValueError, match="is no regular expression: "):
            adapter_targets({"target_modules": wrong, "r": 4})


def test_a_base_that_peft_has_changed_is_not_the_one_on_disk(tmp_path: Path) -> None:
    """PiSSA takes the largest directions out of W. Its adapter without that W is another model."""
    peft, base = pytest.importorskip("peft"), saved_base("llama", tmp_path)
    settings = CASES["llama, query and value"][1] | {"task_type": "CAUSAL_LM", "init_lora_weights": "pissa"}
    peft.get_peft_model(their_base(base).float(), peft.LoraConfig(**settings)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConversionError, match=r"init_lora_weights 'pissa'; .*path_initial_model_for_weight_conversion"):
        open_source(tmp_path / "adapter")


def test_what_is_more_than_low_rank_is_refused(tmp_path: Path) -> None:
    settings = CASES["llama, query and value"][1]
    with pytest.raises(ConversionError, match=r"use_dora True.*plain LoRA"):
        open_source(made("llama", settings | {"use_dora": True}, tmp_path / "dora"))
    with pytest.raises(ConversionError, match=r"adapters of what the model has not: base_model\.model\.lm_head"):
        open_source(made("llama", settings | {"target_modules": ["q_proj", "lm_head"]}, tmp_path / "head"))
    whole = made("llama", settings, tmp_path / "gone")
    config = json.loads((whole / "adapter_config.json").read_text())
    (whole / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/somewhere"}))
    with pytest.raises(ConversionError, match=r"holds adapters of the model someone/somewhere: .* is not in the cache"):
        open_source(whole)
