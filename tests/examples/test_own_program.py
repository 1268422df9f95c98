"""The program of the documentation: own data, own loop, under torchrun and under Ray Train."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megazero.convert.native import NativeSource
from megazero.convert.registry import open_source

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "own_program.py"


def losses_of(told: str) -> dict[int, float]:
    """Validation losses by iteration, as the log says them."""
    found = re.findall(r"validation after iteration (\d+): +valid_loss ([\d.]+)", told)
    return {int(iteration): float(loss) for iteration, loss in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says on one process."""
    return program([sys.executable], tmp_path_factory.mktemp("alone"))


def program(start: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, str(PROGRAM)], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_the_same_training(told: str, alone: str, folder: Path) -> None:
    """Losses are those of one process but for the rounding of bf16, and a model has been learned and saved."""
    ours, theirs = losses_of(told), losses_of(alone)
    assert ours.keys() == theirs.keys() and 50 in ours
    assert ours == pytest.approx(theirs, rel=0.02) and ours[50] < 2.5
    with open_source(folder / "checkpoints" / "own") as source:
        assert isinstance(source, NativeSource) and source.model.hidden_size == 64


@pytest.mark.slow
def test_it_trains_under_torchrun(alone: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = program(torchrun, tmp_path)
    is_the_same_training(told, alone, tmp_path)
    assert told.count("Result(iteration=") == 1 and "finished=" in told


def as_a_worker(config: dict[str, Any]) -> None:
    """The program in a worker of Ray Train, whose process group it finds and leaves."""
    import torch
    import torch.distributed as dist

    os.chdir(config["folder"])
    rank, said = dist.get_rank(), sys.stdout
    with open(f"said {rank}", "w") as sys.stdout:
        runpy.run_path(config["program"], run_name="__main__")
    sys.stdout = said
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks)
    Path(f"sum {rank}").write_text(f"{dist.get_backend()} {ranks.item()}")


@pytest.mark.slow
def test_it_trains_under_ray_train(alone: str, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray Train is not installed: pip install 'ray[train]'")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": environment},
        log_to_driver=False,
    )
    try:
        TorchTrainer(
            as_a_worker,
            train_loop_config={"folder": str(tmp_path), "program": str(PROGRAM)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert [(tmp_path / f"sum {rank}").read_text() for rank in (0, 1)] == ["gloo 1.0"] * 2
    is_the_same_training((tmp_path / "said 0").read_text(), alone, tmp_path)
