"""What a run says of the operations it computes: the published formulas by hand, and the products
that are really made.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megazero.report.banner import banner
from megazero.telemetry.record import StepRecord
from tests.parity.training import data_flags, job_on_rank, report_of

LAYERS, HIDDEN, SEQUENCE, VOCABULARY, BATCH = 3, 24, 12, 1003, 8
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE} --vocab-size "
    f"{VOCABULARY}"
).split()
NUMBERS = (
    f"--train-iters 1 --global-batch-size {BATCH} --micro-batch-size 4 --precision fp64 "
    "--make-vocab-size-divisible-by 1"
).split()
CORES = LAYERS * 4 * BATCH * SEQUENCE**2 * HIDDEN


def by_hand(passes: int) -> float:
    """A step with so many passes through blocks and three through the head (Narayanan et al.

    2021, whose 96 is 4 layers' passes of 24).
    """
    block = 24 * BATCH * SEQUENCE * HIDDEN**2 * (1 + SEQUENCE / (6 * HIDDEN))
    return passes * block + 6 * BATCH * SEQUENCE * HIDDEN * VOCABULARY


CASES = {
    "full": (["full"], by_hand(4 * LAYERS), by_hand(4 * LAYERS) - by_hand(3 * LAYERS)),
    "every second": (
        ["full", "--recompute-num-layers", "2"],
        by_hand(3 * LAYERS + 2),
        by_hand(3 * LAYERS + 2) - by_hand(3 * LAYERS),
    ),
    # torch's checkpoint stops before the last product, for whose backward its operands are enough; a kernel runs whole
    "selective": (["selective"], by_hand(3 * LAYERS) + CORES, CORES / 2),
}


def step(flags: list[str]) -> tuple[StepRecord, str, int]:
    """The record of a run's first step, its banner, the operations counted in its products."""
    job, recorder = job_on_rank(0, 1, [*MODEL, *NUMBERS, *flags])
    with FlopCounterMode(display=False) as counter:
        job.trainer.train_step(stop=False)
    (record,) = recorder.records
    return (
        record,
        banner(report_of(job)),
        counter.get_total_flops(),
    )


@pytest.mark.slow
def test_the_hardware_computes_what_is_said(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")  # what a kernel multiplies is not seen
    data, model = data_flags(corpus, tmp_path / "cache"), by_hand(3 * LAYERS)
    record, told, plain = step(data)
    assert record.model_tflops_per_rank * record.step_seconds * 1e12 == pytest.approx(model, rel=1e-12)
    assert "hardware_tflops_per_rank" not in record.as_json() and "recompute" not in told
    for name, (asked, hardware, again) in CASES.items():
        record, told, counted = step([*data, "--recompute-granularity", *asked])
        assert record.model_tflops_per_rank * record.step_seconds * 1e12 == pytest.approx(model, rel=1e-12), name
        rate = record.hardware_tflops_per_rank
        assert rate is not None and record.as_json()["hardware_tflops_per_rank"] == rate
        assert rate * record.step_seconds * 1e12 == pytest.approx(hardware, rel=1e-12), name
        assert f"{asked[0]}, {hardware / model - 1:.0%} on top of the model's operations" in told
        assert counted - plain == again, name
