"""A training in whose processes unwritten memory holds NaN, and whose collectives bring their results as late as
possible: the same bits.

Memory that is new from the system is zero, and old memory mostly holds harmless numbers. The padding of a bucket was
such memory: the int8 block (--zero-quantized-weights) that reached into it lost precision in most processes, and was
NaN in a few.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.late import late_collectives
from tests.parameters import assemble
from tests.parity.training import data_flags, small_model, train_on_rank
from tests.ranks import run_ranks
from tests.unwritten import unwritten_memory_is_nan

MODEL = [*small_model(2, heads=4), "--global-batch-size", "8", "--micro-batch-size", "1", "--lr", "1e-2"]
LAYOUTS = {
    "ZeRO-3, int8 weights": (2, "--zero-stage 3 --precision bf16 --zero-quantized-weights"),
    "ZeRO-3 in a pipeline": (
        4,
        "--zero-stage 3 --precision fp16 --initial-loss-scale 1024 --pp 2 --pipeline-schedule zb-h1 "
        "--recompute-granularity full --zero3-persist-below 30",
    ),
    "ZeRO-2, int4 gradients in two sets of two": (
        4,
        "--zero-stage 2 --precision bf16 --zero-shard-size 2 --zero-quantized-gradients int4 --bucket-size 3000",
    ),
    "ZeRO-1 without overlap": (2, "--zero-stage 1 --precision bf16 --zero-quantized-weights --no-overlap"),
    "ZeRO-0 in two sets of two": (4, "--zero-shard-size 2 --untie-embeddings-and-output-weights --precision fp32"),
}


def train_in_nan(rank: int, size: int, flags: list[str], fused: str) -> Any:
    with unwritten_memory_is_nan(), late_collectives() as count:
        result = train_on_rank(rank, size, flags, fused)
    assert count
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_reads_what_nobody_has_written(name: str, corpus: Path, tmp_path: Path) -> None:
    size, words = LAYOUTS[name]
    flags = [*MODEL, *words.split(), "--train-iters", "2", *data_flags(corpus, tmp_path / "cache")]
    fused = os.environ.get("MEGAZERO_FUSED", "auto")
    ours, theirs = (run_ranks(size, body, size, flags, fused) for body in (train_in_nan, train_on_rank))
    for (records, losses, _), (others, expected, _) in zip(ours, theirs, strict=True):
        assert [(r.loss, r.grad_norm, r.skipped) for r in records] == [(r.loss, r.grad_norm, False) for r in others]
        assert losses == expected
    weights, rights = (assemble(pieces for _, _, pieces in results) for results in (ours, theirs))
    assert all(bool((weights[name] == right).all()) for name, right in rights.items())
