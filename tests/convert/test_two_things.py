"""A folder that can be read as two things: it is read as `transformers` reads it, or refused with both names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megazero
from megazero.cli.main import main
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.registry import format_table, open_source, recognise
from megazero.convert.source import ConversionError
from megazero.convert.verification import verify
from megazero.data.progress import silent
from megazero.train.init_from import model_source
from tests.lora.families import saved_base, their_base, with_adapters
from tests.lora.test_peft_reader import CASES, made
from tests.parity.float64 import in_float64

IDS = torch.randint(1003, (1, 12), generator=torch.Generator().manual_seed(1))
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def times(folder: Path, factor: float, file: str = "model.safetensors") -> Path:
    """The model of a folder with other weights, so that reading the wrong file shows."""
    tensors = {key: value * factor for key, value in load_file(folder / "model.safetensors").items()}
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file, {"format": "pt"})
    return folder


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A model and adapters in one folder; adapter_config.json names another model."""
    adapter = made("llama", CASES["llama, query and value"][1], tmp_path)
    folder = Path(shutil.copytree(tmp_path / "llama", tmp_path / "both"))
    for name in ADAPTER_FILES:
        shutil.copy(adapter / name, folder)
    times(tmp_path / "llama", 1.1)
    return folder


def test_a_model_and_adapters_are_refused_until_one_is_named(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`transformers` reads the model alone without PEFT, and the model with the adapters where PEFT is installed."""
    with pytest.raises(ConversionError) as error:
        open_source(both)
    for word in ("model.safetensors", "adapter_model.safetensors", "--from hf", "--from peft", str(both)):
        assert word in str(error.value)
    with in_float64(), torch.no_grad():
        adapted = their_base(both)
        added = adapted(IDS).logits
        adapted.disable_adapters()
        alone = adapted(IDS).logits
    assert (added - alone).abs().max() > 1e-3
    for format, theirs in (("hf", alone), ("peft", added)):
        ours = megazero.load(both, precision="fp64", format=format)(IDS)
        assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max(), format
    for line in (["inspect", str(both)], ["convert", str(both), "--to", "hf", "--output", str(both / "x")]):
        assert main(line) != 0
        assert "--from peft" in capsys.readouterr().err
    assert any("--from peft" in problem for problem in model_source(str(both)).problems)


@pytest.mark.parametrize("format", ["hf", "peft"])
def test_either_meaning_is_converted(format: str, both: Path, tmp_path: Path) -> None:
    """`transformers` judges both: it adds the adapters of the folder by itself, and is kept from that for the model."""
    with open_source(both, format) as source:
        for target in ("hf", "megazero"):
            convert(source, format_table()[target], tmp_path / target, TargetOptions(), silent)
            assert verify(source, tmp_path / target, target, silent).holds
    with open_source(both, "peft") as source, pytest.raises(ConversionError, match="holds the model itself too"):
        convert(source, format_table()["peft"], tmp_path / "alone", TargetOptions(), silent)


def test_adapters_on_a_folder_of_two_things(both: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "adapter" / ADAPTER_FILES[0]).read_text())
    (tmp_path / "adapter" / ADAPTER_FILES[0]).write_text(json.dumps(config | {"base_model_name_or_path": str(both)}))
    with pytest.raises(ConversionError, match=f"{both} can be read as two things"):
        open_source(tmp_path / "adapter")


def test_adapters_in_a_file_of_torch(tmp_path: Path) -> None:
    """PEFT's older file counts as the newer one does, beside a model and alone."""
    adapter = made("llama", CASES["llama, query and value"][1], tmp_path)
    with in_float64(), torch.no_grad():
        theirs = with_adapters(their_base(tmp_path / "llama"), adapter)(IDS).logits
    torch.save(load_file(adapter / ADAPTER_FILES[1]), adapter / "adapter_model.bin")
    (adapter / ADAPTER_FILES[1]).unlink()
    ours = megazero.load(adapter, precision="fp64")(IDS)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    for file in adapter.iterdir():
        shutil.copy(file, tmp_path / "llama")
    with pytest.raises(ConversionError, match=r"peft and hf; .*adapter_model\.bin"):
        open_source(tmp_path / "llama")
    (tmp_path / "llama" / "adapter_model.bin").unlink()
    with pytest.raises(ConversionError, match="two things"):
        open_source(tmp_path / "llama")
    with pytest.raises(ConversionError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        open_source(tmp_path / "llama", "peft")


def test_a_checkpoint_of_megazero_and_a_model(tmp_path: Path) -> None:
    folder = saved_base("llama", tmp_path)
    with open_source(folder) as source:
        convert(source, format_table()["megazero"], tmp_path / "mine", TargetOptions(), silent)
    for file in (tmp_path / "mine").iterdir():
        shutil.move(file, folder)
    with pytest.raises(ConversionError, match=r"two things: megazero and hf\. Say which: --from megazero or --from hf"):
        open_source(folder)
    assert open_source(folder, "hf").format == "hf" and open_source(folder, "megazero").format == "megazero"


def test_what_deepspeed_leaves_beside_a_model_is_no_second_one(tmp_path: Path) -> None:
    """Checkpoints of `transformers`' Trainer with DeepSpeed: its files hold no layers, which Megatron-DeepSpeed has."""
    folder = saved_base("llama", tmp_path)
    (folder / "latest").write_text("global_step5")
    (folder / "global_step5").mkdir()
    torch.save({}, folder / "global_step5" / "mp_rank_00_model_states.pt")
    assert recognise(folder) == "hf"


FILES: dict[str, tuple[str, ...]] = {
    "one file before its torch form": ("model.safetensors", "pytorch_model.bin"),
    "one file before the index of several": ("model.safetensors", "model.safetensors.index.json"),
    "several before the torch form": ("model.safetensors.index.json", "pytorch_model.bin"),
}


@pytest.mark.parametrize("case", FILES)
def test_of_several_weight_files_the_same_ones_count(case: str, tmp_path: Path) -> None:
    folder = saved_base("llama", tmp_path)
    factors = dict(zip(FILES[case], (1.1, 0.9), strict=True))
    for file, factor in factors.items():
        if file.endswith(".index.json"):
            times(folder, factor, "part.safetensors")
            keys = load_file(folder / "model.safetensors")
            (folder / file).write_text(
                json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, "part.safetensors")})
            )
        elif file.endswith(".bin"):
            times(folder, factor, file)
    if "model.safetensors" not in factors:
        (folder / "model.safetensors").unlink()
    with in_float64(), torch.no_grad():
        theirs = their_base(folder)(IDS).logits
    with open_source(folder) as source:
        assert any(f"{FILES[case][1]}" in note and "not read" in note for note in source.report.notes)
    ours = megazero.load(folder, precision="fp64")(IDS)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()


def test_config_json_may_name_the_weights(tmp_path: Path) -> None:
    folder = times(saved_base("llama", tmp_path), 1.1, "other.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def named(file: Any) -> Path:
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": file}))
        return folder

    with in_float64(), torch.no_grad():
        theirs = their_base(named("other.safetensors"))(IDS).logits
    ours = megazero.load(folder, precision="fp64")(IDS)
    assert (ours - theirs).abs().max() < 1e-10 * theirs.abs().max()
    for wrong in ("../other.safetensors", "other.bin", 5):
        with pytest.raises(ConversionError, match="transformers_weights"):
            open_source(named(wrong))


def test_weights_under_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    folder = saved_base("llama", tmp_path).rename(tmp_path / os.fsdecode(b"m\xff"))
    with pytest.raises(
        ConversionError, match=r"model\.safetensors: the library safetensors opens no path that is not UTF-8"
    ):
        open_source(folder)
