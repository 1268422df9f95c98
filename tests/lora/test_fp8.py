"""Adapters on frozen weights whose products are FP8: near 16 bits, alike on layouts, and with a history that a
checkpoint keeps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.test_fp8 import DISTANCE, MODEL, SCALINGS, distance
from tests.parity.training import Outcome, data_flags, train

NUMBERS = (
    "--global-batch-size 8 --micro-batch-size 2 --lr 1e-2 --train-iters 6 --lora-rank 4 --precision bf16 "
    "--seq-length 32"
)


def norms(outcome: Outcome) -> list[float]:
    return [record.grad_norm for record in outcome.records]


@pytest.mark.slow
def test_frozen_products_in_fp8(corpus: Path, tmp_path: Path) -> None:
    data = data_flags(corpus, tmp_path / "cache")
    words = "--global-batch-size 8 --train-iters 10 --lr 3e-3 --save"
    train(1, [*MODEL, *data, *words.split(), str(tmp_path / "base")])
    flags = [*NUMBERS.split(), *data, "--init-from", str(tmp_path / "base")]
    plain = train(1, flags)
    narrow = {name: train(1, [*flags, *more]) for name, more in SCALINGS.items()}
    for outcome in narrow.values():
        assert 0 < distance(outcome, plain) < DISTANCE / 5
        assert norms(outcome) == pytest.approx(norms(plain), rel=0.1) and norms(outcome) != norms(plain)
    layout = "--tp 2 --sequence-parallel --pp 2 --recompute-granularity full"
    other = train(4, [*flags, *SCALINGS["current"], *layout.split()])
    assert distance(other, narrow["current"]) < DISTANCE / 5
    delayed = [*flags, *SCALINGS["delayed"], "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    train(1, [*delayed, "--exit-interval", "3"])
    last = train(1, delayed)
    assert [record.loss for record in last.records] == [record.loss for record in narrow["delayed"].records[3:]], (
        "to the bit"
    )
