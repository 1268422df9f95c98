"""The program of the documentation: own data, own loop, under torchrun and under Ray Train."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megazero.convert.native import NativeSource
from megazero.convert.registry import open_source
from tests.e2e.command import environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "own_program.py"


def losses_of(told: str) -> dict[int, float]:
    """Validation losses by iteration, as the log says them."""
    found = re.findall(r"validation after iteration (\d+): +valid_loss ([\d.]+)", told)
    return {int(iteration): float(loss) for iteration, loss in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says on one process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as told:
        patch.chdir(tmp_path_factory.mktemp("alone"))
        patch.setenv("OMP_NUM_THREADS", "1")
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return told.getvalue()


def is_the_same_training(told: str, alone: str, folder: Path) -> None:
    """Losses are those of one process but for the rounding of bf16, and a model has been learned and saved."""
    ours, theirs = losses_of(told), losses_of(alone)
    assert ours.keys() == theirs.keys() and 50 in ours
    assert ours == pytest.approx(theirs, rel=0.02) and ours[50] < 2.5
    with open_source(folder / "checkpoints" / "own") as source:
        assert isinstance(source, NativeSource) and source.model.hidden_size == 64


@pytest.mark.slow
def test_it_trains_under_torchrun(alone: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    place = environment()
    done = subprocess.run(torchrun, cwd=tmp_path, env=place, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    is_the_same_training(done.stdout, alone, tmp_path)
    assert done.stdout.count("Result(iteration=") == 1 and "finished=" in done.stdout


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

    place = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=100 * 2**20, runtime_env=place, **quiet)
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
