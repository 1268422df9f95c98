"""--overlap changes no bit of a run: with gloo's own collectives, which run beside the backward, and with such as come
as late as they may.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.telemetry.record import StepRecord
from tests.late import late_collectives
from tests.parameters import Piece, assemble
from tests.parity.training import Outcome, data_flags, small_model, train_on_rank
from tests.ranks import run_ranks
from tests.stages import SHARDED_GRADIENTS

MODEL = small_model(4, heads=4)
NUMBERS = [
    "--precision",
    "bf16",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "8",
    "--train-iters",
    "4",
    "--lr",
    "1e-3",
]


def body(
    rank: int, size: int, flags: list[str], late: bool
) -> tuple[tuple[list[StepRecord], dict[str, float], list[Piece]], int]:
    if not late:
        return train_on_rank(rank, size, flags, "auto"), 0
    with late_collectives() as count:
        return train_on_rank(rank, size, flags, "auto"), len(count)


def outcome(flags: list[str], late: bool) -> Outcome:
    results = run_ranks(4, body, 4, flags, late)
    assert all((count > 0) == late for _, count in results)
    (records, losses, _) = results[0][0]
    return Outcome(records, losses, assemble([pieces for (_, _, pieces), _ in results]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "late"),
    [
        (["--zero-stage", "1", "--pp", "2", "--no-shared-memory"], False),
        *((["--zero-stage", str(stage), "--pp", "2"], True) for stage in SHARDED_GRADIENTS),
        (["--zero-stage", "1", "--tp", "2", "--sequence-parallel"], True),
        *((["--zero-stage", stage, "--pp", "2", "--late-update"], True) for stage in ("1", "3")),
        (["--zero-stage", "3", "--pp", "2", "--micro-batch-order", "vertical"], True),
    ],
    ids=[
        *("gloo", *(f"late-z{stage}" for stage in SHARDED_GRADIENTS), "late-sequence-parallel"),
        *("late-update-z1", "late-update-z3", "vertical-z3"),
    ],
)
def test_fault_19_overlap_changes_no_bit(layout: list[str], late: bool, corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *NUMBERS, *layout, "--bucket-size", "2000", *data_flags(corpus, tmp_path / "cache")]
    with_overlap, without = outcome(flags, late), outcome([*flags, "--no-overlap"], False)
    for key in ("loss", "grad_norm"):
        assert [getattr(r, key) for r in with_overlap.records] == [getattr(r, key) for r in without.records], key
    assert with_overlap.losses == without.losses
    for name, weight in without.weights.items():
        assert torch.equal(with_overlap.weights[name], weight), name
