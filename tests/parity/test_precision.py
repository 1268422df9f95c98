"""16-bit training on real text follows fp32: 50 steps of the reference data, over tp and over ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import job_on_rank, small_model
from tests.ranks import run_ranks
from tests.reference import REFERENCE, needs_reference

MODEL = [*small_model(4, heads=4), "--hidden-size", "48", "--seq-length", "64", "--vocab-size", "5000"]
NUMBERS = "--train-iters 50 --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 5 --eval-iters 0"
LAYOUTS = {
    "bf16": ["--tp", "2", "--sequence-parallel", "--micro-batch-size", "8"],
    "fp16": ["--zero-stage", "2", "--micro-batch-size", "4"],
}
"""Each on two ranks."""
LAST = 20


def losses_on_rank(rank: int, size: int, flags: list[str]) -> tuple[list[float], int]:
    job, recorder = job_on_rank(rank, size, flags)
    job.fit()
    return [record.loss for record in recorder.records], sum(record.skipped for record in recorder.records)


def tail_loss(size: int, flags: list[str]) -> tuple[float, float, int]:
    """First loss, mean loss over the last steps, and how many steps were skipped."""
    losses, skipped = run_ranks(size, losses_on_rank, size, flags)[0]
    return losses[0], sum(losses[-LAST:]) / LAST, skipped


@pytest.mark.slow
@needs_reference
def test_bf16_and_fp16_follow_fp32(tmp_path: Path) -> None:
    assert REFERENCE is not None
    text = REFERENCE / "meg-gpt2-openwebtext_text_document"
    data = ["--data-path", str(text), "--data-cache-path", str(tmp_path / "cache")]
    flags = [*MODEL, *NUMBERS.split(), *data]
    first, expected, _ = tail_loss(1, [*flags, "--precision", "fp32", "--micro-batch-size", "8"])
    assert expected < first - 1.0
    for precision, layout in LAYOUTS.items():
        _, found, skipped = tail_loss(2, [*flags, *layout, "--precision", precision])
        print(f"{precision}: {found:.4f}, fp32 {expected:.4f}, {skipped} skipped")
        assert found == pytest.approx(expected, rel=0.01), precision
        assert skipped < 10
