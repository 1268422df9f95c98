"""How a run starts: what it says, and what it refuses once it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.build import axes_of
from megazero.config.parse import ConfigError, parse_run
from megazero.data.progress import silent
from megazero.job import build_job
from megazero.mpu.grid import build_grid
from megazero.prepare import prepare
from tests.ranks import run_ranks

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8", "--vocab-size", "1003"]
BATCH = ["--global-batch-size", "4", "--micro-batch-size", "2", "--train-iters", "3", "--precision", "fp32"]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[str]:
    return [*MODEL, *BATCH, "--data-path", str(corpus), "--data-cache-path", str(tmp_path / "cache")]


def refused(rank: int, words: list[str], world_size: int) -> str:
    """What building the job on this rank is refused with."""
    prepared = prepare(parse_run(words, world_size), world_size, silent)
    with pytest.raises(ConfigError) as caught:
        build_job(prepared, build_grid(axes_of(prepared.run, world_size), "cpu"))
    return str(caught.value)


@pytest.mark.parametrize("flag", ["--save", "--metrics-file"])
def test_what_looks_usable_and_is_not_is_one_line_on_every_rank(flag: str, flags: list[str]) -> None:
    """/proc says that root may write into it, and takes nothing."""
    place = "/proc/self/fdinfo/x"
    for told in run_ranks(2, refused, [*flags, flag, place], 2):
        assert told.startswith(f"1 problem in the configuration:\n  1. {flag} {place}: ") and len(told.splitlines()) == 2
