"""The order of the micro-batches with parameters on disks, in real runs: what is read, what is told, one order on all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.connect import connect
from megazero.mpu.grid import build_grid
from megazero.plan.budgets import order_within_budgets
from megazero.plan.recompute import activation_peaks
from megazero.plan.step_memory import run_peaks
from megazero.train import resolve as resolving
from megazero.train.checked import dry_run_text, resolved_on_all_ranks
from megazero.train.job import build_job
from megazero.train.prepare import prepare
from megazero.train.requirements import room_problems, swap_bytes
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks
from tests.train.starts import resolved_for

MODEL = [*small_model(3, heads=4), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "2"]
MODEL += ["--precision", "bf16", "--eval-iters", "0", "--nvme-buffer-bytes", "1MB", "--offload-params", "nvme"]
HORIZONTAL = ["--micro-batch-order", "horizontal"]


def flags_of(corpus: Path, tmp_path: Path) -> list[str]:
    return [*MODEL, "--nvme-path", str(tmp_path), *data_flags(corpus, tmp_path / "cache"), "--eval-iters", "0"]


def test_a_unit_is_read_once_for_all_micro_batches(corpus: Path, tmp_path: Path) -> None:
    read = []
    for words in ([], HORIZONTAL):
        job, _ = job_on_rank(0, 1, [*flags_of(corpus, tmp_path), *words])
        assert job.state.model.tiers.swap is not None
        begun = job.state.model.tiers.swap.bytes_read
        job.fit()
        read.append(job.state.model.tiers.swap.bytes_read - begun)
        job.close()
    assert 0 < 3 * read[0] < read[1]


def test_the_banner_and_a_dry_run_tell_of_it(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And under a budget that has room for horizontal order only, the run begins with that."""
    flags = flags_of(corpus, tmp_path)
    run = parse_run([*flags, *HORIZONTAL], 1)
    least = run_peaks(run, axes_of(run, 1), "cpu")[0].total_bytes
    for words, said in (
        ([], "order of the micro-batches is vertical, so that a layer's parameters are read once for all 4 of them"),
        (["--device-memory-budget", str(least)], "order of the micro-batches is horizontal, because the budgets"),
        (HORIZONTAL, None),
    ):
        parsed = parse_arguments([*flags, *words], 1)
        prepared = prepare(parsed.run, 1, silent)
        build_job(prepared, build_grid(axes_of(prepared.run, 1), "cpu"), parsed=parsed).close()
        dry = dry_run_text(parse_arguments([*flags, *words, "--validate-only"], 1), 1)
        for text in (capsys.readouterr().out, dry):
            told = " ".join(text.split())
            assert "the order of the micro-batches is" not in told if said is None else said in told
            assert ("Vertical order: all 4 micro-batches" in told) == (not words)


def order_on_rank(rank: int, size: int, flags: list[str]) -> tuple[str | None, int | None]:
    """As on a card, where rank 0 tries the body of attention and finds the order."""
    run = parse_run(flags, size)
    grid = build_grid(axes_of(run, size), "cpu")
    connect(grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "order_within_budgets", lambda *of: _found_by(rank))
        begun = resolved_for(run, size, tries_kernels=False)
        assert begun.left_open == ("micro_batch_order",)
        run = resolved_on_all_ranks(begun, grid, size).run
    return run.parallel.micro_batch_order, run.parallel.vertical_group_size


def _found_by(rank: int) -> Mapping[str, Any]:
    assert rank == 0
    return {"micro_batch_order": "vertical", "vertical_group_size": 2}


def test_all_ranks_take_the_order_of_rank_0(tmp_path: Path) -> None:
    flags = [*MODEL, "--nvme-path", str(tmp_path), "--data-path", "x", "--device-memory-budget", "1MB"]
    assert run_ranks(2, order_on_rank, 2, flags) == [("vertical", 2)] * 2


def test_files_are_those_of_the_order_that_there_is_room_for(tmp_path: Path) -> None:
    """With a budget of activations that vertical order does not keep: that is no error where horizontal order does."""
    flags = [*MODEL, "--nvme-path", str(tmp_path), "--data-path", "x", "--offload-activations", "nvme"]
    recomputed = parse_run([*flags, *HORIZONTAL, "--recompute-granularity", "full"], 1)
    axes = axes_of(recomputed, 1)
    (least,) = activation_peaks(recomputed, axes, "cpu")
    open_run, horizontal = (
        parse_run([*flags, *words, "--activation-memory-budget", str(least)], 1) for words in ([], HORIZONTAL)
    )
    with pytest.raises(ConfigError, match="--activation-memory-budget"):
        swap_bytes(open_run, axes, [0])
    assert order_within_budgets(open_run, axes, "cpu") == {"micro_batch_order": "horizontal"}
    assert swap_bytes(horizontal, axes, [0]) > 0
    assert room_problems(resolved_for(open_run).run, 1, range(1)) == []
