"""The model state of BLOOM-176B by column is that of the ZeRO papers' arithmetic (arXiv:1910.02054, section 5)."""

from __future__ import annotations

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.rank_state import stage_bytes
from tests.stages import STAGES

HELD = {"bf16": (2, 4, 12), "fp16": (2, 4, 12), "fp32": (4, 4, 8), "fp64": (8, 8, 16)}
"""Bytes of a parameter, of its gradient, and of its master weight and two moments."""

TP, DP = 4, 8
BLOCKS = (5, *(6,) * 10, 5)
"""Of each stage, in BLOOM's own layout."""


HIDDEN, VOCABULARY = 14336, 250880


def without_table(stage: int) -> tuple[int, int]:
    """Parameters of a tp rank beside the word embedding, and tensors. A whole block has 12 h^2 + 13 h parameters."""
    ends, blocks = stage in (0, len(BLOCKS) - 1), BLOCKS[stage]
    split, replicated = 12 * HIDDEN * HIDDEN + 7 * HIDDEN, 6 * HIDDEN
    return blocks * (split // TP + replicated) + ends * 2 * HIDDEN, 12 * blocks + 3 * ends


@pytest.mark.sampled
@pytest.mark.parametrize("shard_size", [None, DP, 2])
@pytest.mark.parametrize("precision", HELD)
@pytest.mark.parametrize("zero_stage", STAGES)
def test_columns_are_those_of_the_arithmetic(zero_stage: int, precision: str, shard_size: int | None) -> None:
    """(p+g+k)P bytes, where each sharded column is divided by the ranks that share it; padding adds a few elements.

    The table of a tied embedding is on two stages. Both share out its state where no size is given, but for ZeRO-3.
    """
    layout = f"--tp {TP} --pp {len(BLOCKS)} --micro-batch-size 2"
    layout += f" --zero-shard-size {shard_size}" * (shard_size is not None)
    words = f"--preset bloom-176b --data-path x --precision {precision} --zero-stage {zero_stage} {layout}"
    run = parse_run(words.split(), TP * len(BLOCKS) * DP)
    shares = [shard_size or DP if zero_stage >= first else 1 for first in (3, 2, 1)]
    stages_of_table = 2 if shard_size is None and zero_stage < 3 else 1
    for stage, found in enumerate(stage_bytes(run, axes_of(run, TP * len(BLOCKS) * DP))):
        rest, tensors = without_table(stage)
        table = VOCABULARY // TP * HIDDEN * (stage in (0, len(BLOCKS) - 1))
        assert found.blocks == BLOCKS[stage] and found.parameters == rest + table
        columns = zip((found.weights, found.gradients, found.optimizer), HELD[precision], shares, strict=True)
        for held, each, share in columns:
            exact = (rest + table / (stages_of_table if share > 1 else 1)) * each / share
            assert exact <= held <= exact + 2 * DP * tensors * each / share, (stage, each)
