"""Layouts of hundreds and thousands of ranks."""

from __future__ import annotations

import pytest

from megazero.config.parse import parse_run
from megazero.verify.proof import prove


def prove_equal(flags: str, world: int, ranks_run: int) -> None:
    proof = prove(parse_run(flags.split(), world), world)
    assert proof.equal, (proof.difference, proof.failure)
    assert proof.small.axes.world_size == ranks_run and max(proof.errors.values()) < 1e-9


@pytest.mark.slow
@pytest.mark.exhaustive
def test_bloom_on_384_ranks() -> None:
    """48 ranks by role, two replicas of each."""
    prove_equal("--preset bloom-176b --tp 4 --pp 12 --zero-stage 1", 384, 96)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_405b_on_16384_ranks() -> None:
    prove_equal("--preset llama3-405b --tp 8 --pp 16 --zero-stage 1 --sequence-parallel", 16384, 256)
