"""The account of a model state on the device, and the limit that --device-memory-budget puts on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.plan.step_memory import run_peaks
from megazero.train import requirements
from megazero.train.prepare import prepare
from megazero.zero.memories import BudgetExceeded, DeviceMemory
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

MODEL = [*small_model(2, heads=4), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]


def test_the_account() -> None:
    memory = DeviceMemory(torch.device("cpu"), 100)
    memory.take("parameter", 60, "a column")
    memory.take("gathered parameters", 40, "bucket 1")
    memory.give("gathered parameters", 40)
    memory.take("whole gradients", 39, "a buffer")
    with pytest.raises(BudgetExceeded, match="bucket 3 would take 2 bytes, and the model state has 99 already") as told:
        memory.take("gathered parameters", 2, "bucket 3")
    assert "(60 of parameter, 39 of whole gradients)" in str(told.value)
    assert memory.nbytes == 99, "what is refused is not allocated"


def peak(words: list[str], ranks: int) -> int:
    run = parse_run([*MODEL, "--data-path", "x", *words], ranks)
    (found,) = run_peaks(run, axes_of(run, ranks), "cpu")
    return found.device_bytes


def counted_on_rank(rank: int, size: int, flags: list[str]) -> tuple[dict[str, int], dict[str, int], str]:
    """The account and the columns after a run, and how the next step ends once nothing more may be allocated."""
    job, _ = job_on_rank(rank, size, flags)
    job.trainer.fit()
    job.state.model.wait_parameters()
    memory, columns = job.state.model.tiers.device, job.state.model.bytes()
    held, memory.budget = dict(memory.held), memory.nbytes
    try:
        job.trainer.train_step(stop=False)
        told = ""
    except BudgetExceeded as error:
        told = str(error)
    job.close()
    return held, columns, told


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--zero-stage 3", "--zero-stage 2 --offload-optimizer cpu:0.5", "--zero-stage 0"])
def test_a_run_within_its_budget_counts_what_it_allocates(words: str, corpus: Path, tmp_path: Path) -> None:
    """The budget is the planned peak, to the byte. The pool of buffers has all it needs after the first step, gathered
    parameters are allocated in every step: what is more than the limit allows is named.
    """
    budget = ["--device-memory-budget", str(peak(words.split(), 2)), "--host-memory-budget", "1GB"]
    flags = [*MODEL, *words.split(), *budget, *data_flags(corpus, tmp_path)]
    for held, columns, told in run_ranks(2, counted_on_rank, 2, flags):
        gathered, whole = held.pop("gathered parameters", 0), held.pop("whole gradients", 0)
        columns.pop("host memory", None)
        assert gathered == 0 and (whole > 0) == ("2" in words or "3" in words)
        assert {name: size for name, size in held.items() if size} == columns
        assert ("the whole parameters of bucket 0, gathered, would take" in told) == ("stage 3" in words)


def test_a_run_above_its_budget_ends_before_it_starts(corpus: Path, tmp_path: Path) -> None:
    least = peak([], 1)
    flags = [*MODEL, *data_flags(corpus, tmp_path), "--device-memory-budget"]
    prepare(parse_run([*flags, str(least)], 1), 1, silent)
    with pytest.raises(ConfigError) as refused:
        prepare(parse_run([*flags, str(least - 1)], 1), 1, silent)
    (problem,) = refused.value.problems
    assert problem.startswith(f"--device-memory-budget {least - 1:,}: a rank takes {least:,} bytes of memory at")


def test_a_plan_that_is_wrong_is_found_while_the_model_is_built(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "memory_problems", lambda *of: [])
    flags = [*MODEL, *data_flags(corpus, tmp_path), "--device-memory-budget", "200KB"]
    with pytest.raises(BudgetExceeded, match="--device-memory-budget 200,000: a part of the gradient column would"):
        job_on_rank(0, 1, flags)
