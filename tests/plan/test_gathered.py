"""What a run gathers under ZeRO-3, by arithmetic: bytes of a step by hand, and budgets that hold no unit."""

from __future__ import annotations

import pytest

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.step_lists import StageLists
from megazero.plan.traffic import GatheredBytes, gathered_bytes, unit_problems
from megazero.report.banner import gathers_sentence

WORDS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 --zero-stage 3 "
    "--make-vocab-size-divisible-by 100 --position-embedding none --no-embedding-layernorm --disable-bias-linear "
    "--norm rmsnorm --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 --precision fp32"
)
BLOCK, TABLE = 4 * (12 * 16 * 16 + 2 * 16), 4 * 100 * 16
"""Bytes of a block: 12 h^2 in matrices and two norms of h; and of the embedding's or the head's table."""
NORM = 4 * 16
"""Bytes of the norm before the head."""


def run_of(words: str, ranks: int = 2) -> Run:
    return parse_run(f"{WORDS} {words}".split(), ranks)


def steps_of(words: str, ranks: int) -> StageLists:
    run = run_of(words, ranks)
    return StageLists(run, axes_of(run, ranks), nccl=False)


def gathered(words: str, stage: int = 0, ranks: int = 2) -> GatheredBytes:
    found = gathered_bytes(steps_of(words, ranks), stage)
    assert found is not None
    return found


def test_what_each_micro_batch_gathers() -> None:
    """All for forward; for backward the blocks again. The norm stays: its backward follows its forward. The tables,
    which only forward reads, have buckets of their own. From one micro-batch to the next block 0 stays: only the
    embedding is in between, so that its gather would begin where it is released.
    """
    found = gathered("")
    assert found.step == 4 * (2 * TABLE + NORM + 2 * 4 * BLOCK) - 3 * BLOCK
    assert found.budget == 2 * BLOCK


def test_what_a_step_gathers() -> None:
    """With room for everything each bucket once; on two stages each stage its own."""
    assert gathered("--zero3-regather step --zero3-gathered-bytes 1GB").step == 2 * TABLE + NORM + 4 * BLOCK
    first, last = (gathered("--pp 2 --zero3-regather step --zero3-gathered-bytes 1GB", at, 4) for at in (0, 1))
    assert first.step == first.least == TABLE + 2 * BLOCK and last.step == TABLE + NORM + 2 * BLOCK
    tight = gathered("--zero3-regather step")
    assert tight.least <= tight.step <= 1.05 * tight.least < gathered("").step


def test_nothing_is_gathered_where_nothing_is_sharded() -> None:
    assert gathered_bytes(steps_of("--zero-stage 2", 2), 0) is None
    assert gathered_bytes(steps_of("", 1), 0) is None


@pytest.mark.parametrize(
    ("words", "ranks", "name", "needed"),
    [("", 2, "block 0", BLOCK), ("--pp 2", 4, "block 0", BLOCK), ("--vocab-size 5000", 2, "the head", 4 * 5001 * 16)],
)
def test_a_budget_below_one_unit_is_refused_with_the_numbers(words: str, ranks: int, name: str, needed: int) -> None:
    run = run_of(f"{words} --zero3-gathered-bytes {needed - 1}", ranks)
    (problem,) = unit_problems(run, axes_of(run, ranks))
    assert f"--zero3-gathered-bytes {needed - 1} does not hold the largest unit" in problem
    assert f"{name} on stage 0 has {needed} bytes" in problem and f"nearest: --zero3-gathered-bytes {needed}" in problem
    enough = run_of(f"{words} --zero3-gathered-bytes {needed}", ranks)
    assert not unit_problems(enough, axes_of(enough, ranks))


def test_the_banner_compares_with_the_least() -> None:
    least = gathers_sentence(GatheredBytes(1, 2048, 4096, 4096), 2, "step")
    assert "a rank of stage 1 gathers 4.00 KiB a step, the least possible under this budget" in least
    more = gathers_sentence(GatheredBytes(0, 2048, 8192, 4096), 1, "micro-batch")
    assert "a rank gathers 8.00 KiB a step (with --zero3-regather step at least 4.00 KiB)" in more
    near = gathers_sentence(GatheredBytes(0, 2048, 4300, 4096), 1, "step")
    assert "4.20 KiB a step, 1.05 times the least" in near
