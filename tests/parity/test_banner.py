"""What the banner says is what the ranks hold: the numbers come from the arithmetic that packs, the
bytes from memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.plan.rank_state import stage_bytes
from megazero.report.banner import banner
from megazero.zero.sharding import Column
from megazero.zero.state import HOST
from tests.parity.training import data_flags, job_on_rank, report_of, small_model
from tests.ranks import run_ranks

MODEL = small_model(3, heads=4)
NUMBERS = ["--train-iters", "1", "--global-batch-size", "8", "--micro-batch-size", "1"]


def told_and_held(rank: int, size: int, flags: list[str]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """(weights, gradients, optimizer state on the device, host memory), as the banner says and as they are held."""
    job, _ = job_on_rank(rank, size, flags)
    told = stage_bytes(job.run, job.grid.axes)[job.grid.at.pp]
    held = job.state.model.bytes()
    optimizer = sum(held.get(column.value, 0) for column in (Column.MASTER, Column.EXP_AVG, Column.EXP_AVG_SQ))
    text = banner(replace(report_of(job), changes=(("tp", "1", "2"),)))
    job.state.model.tiers.close()
    return (
        (told.weights, told.gradients, told.optimizer, told.elsewhere.memory),
        (held[Column.PARAMETER.value], held[Column.GRADIENT.value], optimizer, held.get(HOST, 0)),
        text,
    )


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["--tp", "2", "--pp", "2"],
        ["--pp", "2", "--virtual-stages", "2"],
        ["--zero-shard-size", "2"],
        ["--pp", "2", "--zero-shard-size", "1"],
        ["--tp", "2", "--offload-optimizer", "cpu:0.7", "--nvme-buffer-bytes", "200KB"],
        ["--pp", "2", "--offload-optimizer", "nvme:0.4", "--nvme-path", "{disk}"],
    ],
)
def test_bytes_in_the_banner_are_those_held(
    layout: list[str], stage: int, precision: str, corpus: Path, tmp_path: Path
) -> None:
    flags = [
        *MODEL,
        *NUMBERS,
        *(word.format(disk=tmp_path) for word in layout),
        "--zero-stage",
        str(stage),
        "--precision",
        precision,
        *data_flags(corpus, tmp_path / "cache"),
    ]
    for told, held, text in run_ranks(4, told_and_held, 4, flags):
        assert told == held
        assert max(map(len, text.splitlines())) <= 100 or str(corpus) in text
