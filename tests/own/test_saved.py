"""Checkpoints of a user's model: a run goes on from one on another layout as if nobody had stopped it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import megazero
from megazero.checkpoint.format import MANIFEST, Damaged
from megazero.checkpoint.reader import read_manifest
from megazero.own.saved import BESIDE
from tests.own.models import CASES, MICRO_BATCHES, RATE, Case, Trained, mlp, plainly_trained, squared
from tests.own.training import OF_ALL, RULE, model_of, require_equal, share_of
from tests.ranks import run_ranks

LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"zero_stage": 1, "late_update": True}),
    (2, {"pp": 2, "offload_optimizer": "cpu"}),
    (4, {"zero_stage": 3, "zero_shard_size": 2}),
    (4, {"pp": 2, "zero_stage": 2}),
    (1, {"offload_optimizer": "cpu", "offload_params": "cpu", "zero_stage": 3}),
)
"""Two steps are made on each, one behind the other."""


def two_steps(rank: int, name: str, layout: dict[str, Any], folder: str) -> Trained:
    case, numbers = CASES[name], list[tuple[float, float]]()
    units = case.built()
    if Path(folder).exists():
        with torch.no_grad():
            for tensor in (each for unit in units for each in (*unit.parameters(), *unit.buffers())):
                tensor.add_(1)  # what a checkpoint has, it sets
    model = megazero.Model(units, case.loss, unused=case.unused)
    with megazero.engine(model, "adamw", RATE, {**RULE, **layout}) as engine:
        about = engine.load(folder) or {"next": 0}
        assert engine.steps == about["next"]
        for step in range(about["next"], about["next"] + 2):
            made = engine.step(share_of(engine, case, step))
            numbers.append((float(made.loss), float(made.grad_norm)))
        engine.save(folder, {"next": about["next"] + 2})
        evaluated = engine.evaluate(share_of(engine, case, case.steps))
        return Trained(numbers, float(evaluated), engine.state_dict())


@pytest.mark.parametrize("name", ["convolutional", "tied ends", "tuples", "vision"])
def test_a_run_goes_on_over_layouts(name: str, tmp_path: Path) -> None:
    expected, numbers, last = plainly_trained(CASES[name]), list[tuple[float, float]](), None
    for size, layout in LAYOUTS:
        last = run_ranks(size, two_steps, name, layout, str(tmp_path / "saved"))[-1]
        numbers += last.numbers
    assert last is not None
    require_equal(replace(last, numbers=numbers), expected, name)


def engine_of(units: list[nn.Module], case: Case = CASES["mlp"]) -> megazero.Engine:
    return megazero.engine(megazero.Model(units, squared), "adamw", RATE, RULE)


def test_a_folder_without_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    with engine_of(CASES["mlp"].built()) as engine:
        before = engine.state_dict()
        assert engine.load(tmp_path) is None and engine.steps == 0
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    case = CASES["mlp"]
    with engine_of(case.built()) as engine:
        engine.step(case.micro_batch(0, 0))
        path = engine.save(tmp_path)
    with engine_of(case.built()[:3] + case.built()[-1:]) as engine, pytest.raises(ValueError, match=r"4\.weight"):
        engine.load(tmp_path)
    wider = [unit.double() for unit in mlp()]
    wider[2].register_buffer("extra", torch.ones(3))
    with engine_of(wider) as engine, pytest.raises(ValueError, match=r"another model: it does not have 2\.extra"):
        engine.load(tmp_path)
    (path / BESIDE).write_bytes(b"no tensors")
    with engine_of(case.built()) as engine, pytest.raises(Damaged, match=f"is damaged: {BESIDE}"):
        engine.load(tmp_path)


def test_a_checkpoint_that_does_not_say_what_its_optimizer_keeps_opens(tmp_path: Path) -> None:
    """Such are those of the time when an engine had our own optimizers alone."""
    case = CASES["mlp"]
    for optimizer, other in (("sgd", "adamw"), ("adam", "sgd")):
        folder = tmp_path / optimizer
        with megazero.engine(model_of(case), optimizer, RATE, OF_ALL) as engine:
            engine.step(case.micro_batch(0, 0))
            path = engine.save(folder) / MANIFEST
            engine.step(case.micro_batch(1, 0))
            whole = engine.state_dict()
        manifest = read_manifest(path.parent)
        del manifest.progress["optimizer_keeps"]
        path.write_bytes(manifest.encode())
        with megazero.engine(model_of(case), optimizer, RATE, OF_ALL) as engine:
            assert engine.load(folder) == {}
            engine.step(case.micro_batch(1, 0))
            assert all(torch.equal(value, whole[name]) for name, value in engine.state_dict().items())
        with (
            megazero.engine(model_of(case), other, RATE, OF_ALL) as engine,
            pytest.raises(ValueError, match="the checkpoint is of another optimizer: it has exp_avg"),
        ):
            engine.load(folder)


def test_numbers_of_a_step_come_back(tmp_path: Path) -> None:
    case = CASES["mlp"]
    with engine_of(case.built()) as engine:
        engine.step(case.micro_batch(0, 0), lr=0.25)
        engine.save(tmp_path, {"epoch": 3, "names": ["a"]})
    with engine_of(case.built()) as engine:
        assert engine.load(tmp_path) == {"epoch": 3, "names": ["a"]}
        assert (engine.steps, engine.lr, float(engine.optimizer.step_count)) == (1, 0.25, 1.0)


def exported(rank: int, path: str) -> dict[str, torch.Tensor]:
    case = CASES["convolutional"]
    with megazero.engine(megazero.Model(case.built(), case.loss), "adamw", RATE, {**RULE, "pp": 2}) as engine:
        engine.step([case.micro_batch(0, number) for number in range(MICRO_BATCHES)])
        engine.export(path)
        return engine.state_dict()


def test_an_export_has_whole_numbers_too(tmp_path: Path) -> None:
    """A batch norm counts its batches."""
    path = tmp_path / "model.safetensors"
    values = run_ranks(2, exported, str(path))[0]
    written = load_file(path)
    assert torch.int64 in {tensor.dtype for tensor in values.values()} and {*written} == {*values}
    assert all(torch.equal(written[name], value) for name, value in values.items())


LEFT = """
import torch, megazero
from tests.own.models import CASES
case = CASES["mlp"]
run = {{"zero_stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": [{folder!r}]}}
{way}
"""
WAYS = {
    "nobody closes it": """
engine = megazero.engine(megazero.Model(case.built(), case.loss), run=run)
engine.step(case.micro_batch(0, 0))
raise RuntimeError("mine")""",
    "an error leaves its block": """
with megazero.engine(megazero.Model(case.built(), case.loss), run=run) as engine:
    engine.step(case.micro_batch(0, 0))
    raise RuntimeError("mine")""",
}


@pytest.mark.parametrize("way", WAYS)
def test_no_swap_file_outlives_an_error(way: str, tmp_path: Path) -> None:
    program = LEFT.format(folder=str(tmp_path), way=WAYS[way])
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert made.stderr.rstrip().endswith("RuntimeError: mine") and "Exception ignored" not in made.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
