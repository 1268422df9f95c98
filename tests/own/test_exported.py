"""The weights of a saved model, of the files alone, beside those of the engine that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megazero
from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.cli.main import main
from megazero.own.saved import BESIDE
from tests.own import models, parallel_models
from tests.own.models import RATE, Case
from tests.own.training import RULE, model_of, share_of
from tests.ranks import run_ranks

CASES: Mapping[str, Case] = {**models.CASES, **{f"cut, {name}": case for name, case in parallel_models.CASES.items()}}
SAVED: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "sharded": ("vision", 2, {"zero_stage": 3}),
    "halves": ("vision", 2, {"zero_stage": 1, "precision": "bf16"}),
    "a module twice, on two stages": ("mlp", 2, {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"}),
    "tied ends": ("tied ends", 3, {"pp": 3, "zero_stage": 1}),
    "frozen norms": ("convolutional", 2, {"zero_stage": 2}),
    "halves, off the device": (
        "vision",
        1,
        {"offload_optimizer": "cpu", "precision": "fp16", "initial_loss_scale": 64.0},
    ),
    "parts": ("cut, tied", 2, {"tp": 2}),
    "parts, sharded": ("cut, partly frozen", 4, {"tp": 2, "zero_stage": 3, "precision": "fp32"}),
}
"""A model, the number of ranks, and their layout."""


class Both(NamedTuple):
    """Tensors as the engine has them, and where the checkpoint is."""

    values: dict[str, Tensor]
    path: str


def saved(rank: int, name: str, folder: str) -> Both:
    model, _, layout = SAVED[name]
    case = CASES[model]
    with megazero.engine(model_of(case), "adamw", RATE, {**RULE, **layout}) as engine:
        for step in range(2):
            engine.step([_in(batch, layout) for batch in share_of(engine, case, step)])
        path = engine.save(folder)
        return Both(engine.state_dict(), str(path))


def _in(batch: dict[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """Floats in the dtype of the run."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(layout.get("precision", ""))
    return {key: each.to(dtype) if dtype and each.is_floating_point() else each for key, each in batch.items()}


@pytest.mark.parametrize("name", SAVED)
def test_the_files_have_what_the_engine_has(name: str, tmp_path: Path) -> None:
    """Under every name. A master weight is one that rounds to the engine's; the plain modules take all of them."""
    model, size, layout = SAVED[name]
    both = run_ranks(size, saved, name, str(tmp_path / "saved"))[0]
    exported = megazero.saved_state_dict(tmp_path / "saved")
    assert exported.keys() == both.values.keys()
    lost = 0
    for key, value in both.values.items():
        assert exported[key].shape == value.shape and torch.equal(exported[key].to(value.dtype), value), key
        lost += int(exported[key].dtype != value.dtype and bool((exported[key] != value.to(exported[key].dtype)).any()))
    assert bool(lost) is (layout.get("precision") in ("bf16", "fp16")), "masters have more digits than the modules"
    assert len({each.data_ptr() for each in exported.values() if each.numel()}) == len(exported)
    plain = nn.ModuleList(CASES[model].built())
    plain.load_state_dict(exported)
    assert main(["export", both.path, str(tmp_path / "file.safetensors")]) == 0
    opened = load_file(tmp_path / "file.safetensors")
    assert opened.keys() == exported.keys()
    assert all(torch.equal(opened[key], each) and opened[key].dtype == each.dtype for key, each in exported.items())


def saved_here(folder: Path, layout: Mapping[str, Any]) -> dict[str, Tensor]:
    case = CASES["convolutional"]
    with megazero.engine(model_of(case), "adamw", RATE, {**RULE, **layout}) as engine:
        engine.step(share_of(engine, case, 0))
        engine.save(folder)
        return engine.state_dict()


def test_floats_are_rounded_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = saved_here(tmp_path / "saved", {})
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "b.safetensors"), "--dtype", "bf16"]) == 0
    told, opened = capsys.readouterr().out, load_file(tmp_path / "b.safetensors")
    assert f"{len(values)} tensors" in told and "b.safetensors" in told
    for key, value in values.items():
        rounded = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert torch.equal(opened[key], rounded) and opened[key].dtype == rounded.dtype, key
    without = megazero.saved_state_dict(tmp_path / "saved", torch.float32, frozen=False)
    module = nn.ModuleList(CASES["convolutional"].built())
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    assert {*without} == trained | {name for name, _ in module.named_buffers()}
    assert {each.dtype for name, each in without.items() if name in trained} == {torch.float32}


def test_a_number_beyond_the_dtype_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    units = [nn.Linear(3, 2).double(), nn.Linear(2, 1).double()]
    with torch.no_grad():
        units[0].weight[0, 0] = 1e6
    model = megazero.Model(units, lambda made, batch: (made.square().sum(), len(made)), input="x")
    with megazero.engine(model, run=RULE) as engine:
        engine.step({"x": torch.ones(2, 3, dtype=torch.float64)})
        engine.save(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "h.safetensors"), "--dtype", "fp16"]) == 2
    told = capsys.readouterr().err
    assert "0.weight holds 999900, and torch.float16 ends at 65504" in told and "--dtype bf16 or fp32" in told, told
    assert not (tmp_path / "h.safetensors").exists()


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_here(tmp_path / "saved", {})
    (tmp_path / "file").write_text("here")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "file")]) == 2
    assert "file is there already" in capsys.readouterr().err and (tmp_path / "file").read_text() == "here"
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "new")]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    (beside,) = (tmp_path / "saved").rglob(BESIDE)
    beside.unlink()
    with pytest.raises(Damaged, match=BESIDE):
        megazero.saved_state_dict(tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "new")]) == 1
    assert BESIDE in capsys.readouterr().err and not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"dtype is torch\.int8: one of floats is needed"):
        megazero.saved_state_dict(tmp_path / "saved", torch.int8)


def test_a_checkpoint_of_a_family_names_the_other_command(tmp_path: Path) -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    megazero.pretrain({**sizes, "train_iters": 1, "global_batch_size": 2, "save": str(tmp_path)})
    with pytest.raises(CheckpointError, match=r"megazero convert --input .*iter_0000001 --to hf"):
        megazero.saved_state_dict(tmp_path)
