"""Ranks that share a card are the same program as one process on the CPU: in float64, to 1e-9."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import nn

from megazero.config.parse import parse_run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from megazero.system import device as devices
from megazero.telemetry.record import StepRecord
from megazero.train.job import build_job
from megazero.train.prepare import prepare
from tests.parameters import Piece, assemble, values_of
from tests.parity.layouts import draw
from tests.parity.training import Outcome, Recorder, data_flags, train, worst
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.cuda_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

STEPS = 5
TOLERANCE = 1e-9
LAYOUTS: dict[str, dict[str, object]] = {
    "tp 2, pp 2": {"tp": 2, "pp": 2, "dp": 1, "tied": True, "positions": "alibi"},
    "tp 2, dp 2, ZeRO-2, sequence parallel": {
        "tp": 2,
        "pp": 1,
        "dp": 2,
        "zero": 2,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "pp 2, dp 2, interleaved, ZeRO-1": {
        "tp": 1,
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "schedule": "interleaved",
        "tied": True,
        "accumulation": 3,
    },
    "pp 4, zb-h1": {
        "tp": 1,
        "pp": 4,
        "dp": 1,
        "schedule": "zb-h1",
        "layers": 7,
        "accumulation": 3,
        "positions": "none",
    },
    "pp 2, dp 2, zb-v, ZeRO-2": {
        "tp": 1,
        "pp": 2,
        "dp": 2,
        "schedule": "zb-v",
        "zero": 2,
        "tied": False,
        "positions": "rotary",
    },
    "tp 3, pp 2": {"tp": 3, "pp": 2, "dp": 1, "heads": 6, "groups": None, "dropout": 0.1},
}
CASES = {name: draw(random.Random(name), fixed | {"shared_memory": True}) for name, fixed in LAYOUTS.items()}
"""Drawn when this file is imported, so that a layout that no model fits is found without a GPU."""


def train_on_card(rank: int, size: int, flags: list[str]) -> tuple[list[StepRecord], dict[str, float], list[Piece]]:
    """As `tests.parity.training.train_on_rank`, with the ranks' cards instead of the CPU."""
    prepared = prepare(parse_run(flags, size), size, silent)
    job = build_job(prepared, build_grid(axes_of(prepared.run, size), devices.resolve("cuda", rank)))
    recorder = Recorder()
    job.trainer.log._sinks = (recorder,)
    job.fit()
    job.state.model.wait_parameters()
    pieces = [Piece(piece.spec, piece.values.cpu()) for piece in values_of(nn.ModuleList(job.stages))]
    return recorder.records, recorder.losses, pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_on_the_card_equals_one_process_on_the_cpu(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    flags = [*case.model.flags(), *data_flags(corpus, tmp_path / "cache"), "--train-iters", str(STEPS)]
    alone = train(1, [*flags, "--micro-batch-size", "1", "--device", "cpu"])
    on_card = [*flags, *case.layout_flags(), "--device", "cuda", "--backend", "gloo"]
    results = run_ranks(case.ranks, train_on_card, case.ranks, on_card)
    records, losses, _ = results[0]
    differences = worst(Outcome(records, losses, assemble([pieces for _, _, pieces in results])), alone)
    assert len(records) == STEPS and all(value < TOLERANCE for value in differences.values()), (case.name, differences)
