"""The functions of `deepspeed.utils.zero_to_fp32`, over what an engine in DeepSpeed's place has saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megazero import deepspeed
from megazero.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.ranks import run_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}


class Tied(nn.Module):
    """With a matrix under two names, a frozen part and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.out.weight = self.into.weight
        self.still = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("shift", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.into(x)) + self.shift.to(x.dtype)
        return self.out(self.still(hidden)).float().square().mean()


def saved(rank: int, folder: str) -> dict[str, Tensor]:
    engine, *_ = deepspeed.initialize(model=Tied(), config=CONFIG)
    for step in range(3):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        engine.backward(engine(x))
        engine.step()
        engine.save_checkpoint(folder, tag="early" if step == 1 else None)
    return engine.module_state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("saved")
    return path, run_ranks(2, saved, str(path))[0]


Saved = tuple[Path, dict[str, Tensor]]


def test_the_weights_are_those_of_the_optimizer(folder: Saved) -> None:
    path, values = folder
    plain = get_fp32_state_dict_from_zero_checkpoint(path)
    assert plain.keys() == values.keys() == Tied().state_dict().keys()
    assert {each.dtype for each in plain.values()} == {torch.float32}
    assert all(torch.equal(plain[name].to(each.dtype), each) for name, each in values.items())
    assert not torch.equal(plain["into.weight"], values["into.weight"].float()), "masters have more digits"
    assert torch.equal(plain["into.weight"], plain["out.weight"])
    early = get_fp32_state_dict_from_zero_checkpoint(path, tag="early")
    assert not torch.equal(early["into.weight"], plain["into.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(path, exclude_frozen_parameters=True)
    assert plain.keys() - trained.keys() == {"still.weight", "still.bias"}
    module = load_state_dict_from_zero_checkpoint(Tied(), path)
    assert all(torch.equal(each, plain[name]) for name, each in module.state_dict().items())


def test_files_are_those_that_programs_open(folder: Saved, tmp_path: Path) -> None:
    path, _ = folder
    plain = get_fp32_state_dict_from_zero_checkpoint(path)
    convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "bin")
    opened = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(opened[name], each) for name, each in plain.items()) and opened.keys() == plain.keys()
    convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "parts", max_shard_size=200, safe_serialization=True)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert len(files) > 1
    parts = {name: each for file in files for name, each in load_file(tmp_path / "parts" / file).items()}
    assert parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(parts[name], plain[name]) for name in parts)


def test_it_is_a_program(folder: Saved, tmp_path: Path) -> None:
    path, _ = folder
    program = [sys.executable, "-m", "megazero.deepspeed.utils.zero_to_fp32"]
    made = [*program, str(path), str(tmp_path / "out"), "--tag", "early", "--safe_serialization"]
    assert subprocess.run(made, check=False).returncode == 0
    opened = load_file(tmp_path / "out" / "model.safetensors")
    early = get_fp32_state_dict_from_zero_checkpoint(path, "early")
    assert all(torch.equal(opened[name], each) for name, each in early.items())
    ended = subprocess.run([*program, str(tmp_path / "none"), str(tmp_path / "x")], capture_output=True, text=True)
    assert ended.returncode == 1 and "holds no complete checkpoint" in ended.stderr and "Traceback" not in ended.stderr
