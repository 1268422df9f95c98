"""Layouts that were wrong once, or hung, and that the generated ones do not have."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.traffic import largest_unit
from tests.parity.tier_layouts import RATES, tight_budget, whole_run
from tests.parity.training import data_flags, small_model, train, unequal, worst
from tests.parity.ways import FP16, Way

pytestmark = pytest.mark.slow

FULL = "--recompute-granularity full"
ODD = "--hidden-size 25 --kv-channels 4 --ffn-hidden-size 96 --seq-length 11"
"""Hidden states of 275 elements, which neither 2 nor 3 ranks divide."""
RAMP = "--rampup-batch-size 4 4 16 --lr-warmup-iters 5 --clip-grad 0.001 --bucket-size 4000"
"""The rate, the batch and with it the number of micro-batches change from step to step."""
DISK = "--offload-activations nvme --nvme-buffer-bytes 600KB"


class Regression(NamedTuple):
    """A layout and flags that change no bit of it. infinite: steps in which a gradient is infinite."""

    ranks: int
    words: str
    more: str
    infinite: frozenset[int] = frozenset()


BITS = {
    "shared inputs that three ranks do not divide": Regression(3, f"--tp 3 {FULL} {ODD}", "--shard-recompute-inputs"),
    "shared inputs of zero-bubble backwards": Regression(
        4, f"--tp 2 --pp 2 --pipeline-schedule zb-h1 {FULL} {ODD} --hidden-dropout 0.1", "--shard-recompute-inputs"
    ),
    "owed updates of twenty steps, of which some are skipped": Regression(
        2,
        f"--zero-stage 3 {FP16} --loss-scale-window 7 --train-iters 20 --micro-batch-size 2 {RAMP}",
        "--late-update",
        frozenset({3, 5, 6, 14, 19}),
    ),
    "masks of dropout on disks": Regression(
        1, "--attention softmax --attention-dropout 0.2 --position-embedding learned --micro-batch-size 2", DISK
    ),
    "documents of a grouped model on disks": Regression(
        1,
        "--norm rmsnorm --activation swiglu --position-embedding rotary --num-query-groups 2 --disable-bias-linear "
        "--document-mask --eod-id 0",
        DISK,
    ),
    "scales of a rank's own weights, shared with replicas over tp": Regression(
        4,
        "--tp 2 --zero-stage 1 --precision fp32 --init-method-std 1 --zero-quantized-weights "
        "--zero-quantized-gradients int4 --zero-gradient-error-feedback",
        "--overlap",
    ),
}


@pytest.mark.parametrize("name", BITS)
def test_no_bit_changes(name: str, corpus: Path, tmp_path: Path) -> None:
    """`train` asserts that replicas are equal."""
    ranks, words, more, infinite = BITS[name]
    flags = [*small_model(4, heads=6), "--global-batch-size", "8", "--micro-batch-size", "1", "--train-iters", "3"]
    flags += ["--lr", "1e-2", *data_flags(corpus, tmp_path / "cache"), *words.split()]
    disks = ["--nvme-path", str(tmp_path)] if "nvme" in more else []
    way = Way(infinite=infinite)
    outcome, plain = (train(ranks, [*flags, *changed], way=way) for changed in ([*more.split(), *disks], []))
    assert not unequal(outcome, plain)
    assert sum(record.skipped for record in plain.records) >= len(infinite)


def test_a_search_shards_parameters_within_each_stage(corpus: Path, tmp_path: Path) -> None:
    """A tied embedding off the device is gathered for each use, and the stages use it at different times."""
    flags = [*small_model(8, heads=3), "--hidden-size", "48", "--precision", "fp64", "--lr", "1e-2"]
    flags += ["--clip-grad", "0.5", "--train-iters", "3", "--global-batch-size", "4"]
    flags += data_flags(corpus, tmp_path / "cache")
    alone = train(1, [*flags, "--micro-batch-size", "4"])
    (tmp_path / "rates.yaml").write_text(RATES)
    search = ["--placement", "auto", "--placement-rates", str(tmp_path / "rates.yaml")]
    for zero_stage in ("1", "2"):
        layout = ["--pp", "2", "--zero-stage", zero_stage, "--micro-batch-size", "1", "--bucket-size", "500"]
        budget = tight_budget(whole_run([*flags, *layout], 4), 4, part=0.02)
        outcome = train(
            4, [*flags, *layout, *search, "--device-memory-budget", str(budget), "--host-memory-budget", "1GB"]
        )
        assert outcome.run is not None and outcome.run.offload.offload_params
        differences = worst(outcome, alone)
        assert all(value < 1e-9 for value in differences.values()), (zero_stage, differences)


@pytest.mark.exhaustive
def test_three_stages_of_four_replicas(corpus: Path, tmp_path: Path) -> None:
    """Twelve ranks: they meet in no smaller layout."""
    flags = [*small_model(5, heads=4), "--precision", "fp64", "--global-batch-size", "16", "--lr", "1e-2"]
    flags += ["--train-iters", "10", "--init-method-std", "0.1", *data_flags(corpus, tmp_path / "cache")]
    words = "--pp 3 --zero-stage 3 --pipeline-schedule zb-h1 --recompute-granularity selective --micro-batch-size 1 "
    layout = [*flags, *(words + "--bucket-size 4000 --zero-shard-size 2 --late-update").split()]
    run = parse_run(layout, 12)
    budget = largest_unit(run, axes_of(run, 12))[0]
    outcome = train(12, [*layout, "--zero3-gathered-bytes", str(budget)])
    differences = worst(outcome, train(1, [*flags, "--micro-batch-size", "4"]))
    assert all(value < 1e-9 for value in differences.values()), differences
