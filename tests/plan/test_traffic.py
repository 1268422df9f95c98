"""Bytes over the data-parallel ranks by formula. That they are those that travel, tests/zero/test_bytes.py shows."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.plan.traffic import Traffic, state_traffic


@pytest.mark.parametrize(
    ("zero_stage", "shard_size", "sets", "expected"),
    [
        # all replicas are neighbours: 2g, g + p, m g + p, m g + 2 m p
        (0, 8, 1, Traffic(8.0, 0.0)),
        (1, 8, 1, Traffic(6.0, 0.0)),
        (2, 8, 1, Traffic(14.0, 0.0)),
        (3, 8, 1, Traffic(24.0, 0.0)),
        (2, 1, 1, Traffic(0.0, 0.0)),
        # and 2g / K across the sets, once per step at every stage
        (0, 2, 4, Traffic(8.0, 4.0)),
        (1, 4, 2, Traffic(6.0, 2.0)),
        (2, 4, 2, Traffic(14.0, 2.0)),
        (3, 4, 2, Traffic(24.0, 2.0)),
        (2, 1, 8, Traffic(0.0, 8.0)),
    ],
)
def test_bytes_per_parameter(zero_stage: int, shard_size: int, sets: int, expected: Traffic) -> None:
    """Gradients of 4 bytes, parameters of 2, three micro-batches; and one reduction where chunks are reduced once."""
    sizes: Any = {"micro_batches": 3, "gradient_bytes": 4, "parameter_bytes": 2}
    found = state_traffic(zero_stage, shard_size, sets, reductions=3, **sizes)
    assert found == expected and found.total == expected.inside + expected.across
    once = state_traffic(zero_stage, shard_size, sets, reductions=1, **sizes)
    saved = 2 * 4.0 if zero_stage >= 2 and shard_size > 1 else 0.0
    assert once == Traffic(expected.inside - saved, expected.across)
