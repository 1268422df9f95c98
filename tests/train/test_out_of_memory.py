"""A run that goes out of memory says what was predicted of its rank, what was reached, and a change that fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.launch import exit_status
from megazero.mpu.axes import axes_of
from megazero.mpu.meeting import Environment
from megazero.plan.step_memory import run_peaks
from megazero.telemetry.units import size
from megazero.train import job as jobs
from megazero.train import run_memory
from megazero.train.run_memory import OutOfMemory
from tests.parity.training import data_flags, job_on_rank
from tests.ranks import run_ranks

MODEL = "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 256 --vocab-size 1003 --eval-iters 0"
LENGTH = "--global-batch-size 4 --micro-batch-size 4 --train-iters 3 --attention softmax --recompute-granularity none"


def planted(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fails(rank: int, ranks: int, flags: list[str], where: str) -> tuple[str, str, int]:
    """What a run ends with, the error's cause and the exit status. where: the part of the run that fails."""
    met = list[BaseException]()

    def run() -> None:
        try:
            with pytest.MonkeyPatch.context() as patch:
                if where == "build":
                    patch.setattr(jobs, "build_state", planted)
                job, _ = job_on_rank(rank, ranks, flags)
                if where == "report":
                    patch.setattr(run_memory, "what_fits", lambda *_: 1 / 0)
                first, engine = job.trainer.engine.train, job.trainer.engine
                patch.setattr(
                    engine, "train", lambda *a, **k: (patch.setattr(engine, "train", planted), first(*a, **k))
                )
                job.fit()
        except BaseException as error:
            met.append(error)
            raise

    status = exit_status(run, Environment(rank, ranks, rank, ranks))
    return type(met[0]).__name__ + ": " + str(met[0]), str(met[0].__cause__), status


@pytest.mark.parametrize("where", ["train", "build"])
def test_it_says_what_was_predicted_and_what_fits(corpus: Path, tmp_path: Path, where: str) -> None:
    flags = [*MODEL.split(), *LENGTH.split(), *data_flags(corpus, tmp_path)]
    (told, cause, status), *_ = run_ranks(1, fails, 1, flags, where)
    assert status == 1 and "Tried to allocate 2.00 GiB" in cause
    run = parse_run(flags, 1)
    (peaks,) = run_peaks(run, axes_of(run, 1), "cpu")
    assert told.startswith("OutOfMemory: rank 0, a rank, has no memory left. Predicted: its tensors take ")
    assert f"take {size(peaks.total_bytes)} at most, at {peaks.moment}. Reached: " in told
    change = re.search(r"Take less; nearest: (--[a-z-]+ \S+) \(([0-9,]+) bytes of memory a rank\)", told)
    assert change, told
    changed = parse_run([*flags, *change[1].split()], 1)
    (fewer,) = run_peaks(changed, axes_of(changed, 1), "cpu")
    assert f"{fewer.total_bytes:,}" == change[2] and fewer.total_bytes < 0.96 * peaks.total_bytes


def test_what_cannot_be_said_hides_no_error(corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL.split(), *LENGTH.split(), *data_flags(corpus, tmp_path)]
    (told, cause, status), *_ = run_ranks(1, fails, 1, flags, "report")
    assert (told.split(".")[0], cause, status) == ("OutOfMemoryError: CUDA out of memory", "None", 1)


def test_whoever_catches_torchs_error_catches_it() -> None:
    assert issubclass(OutOfMemory, torch.OutOfMemoryError)
