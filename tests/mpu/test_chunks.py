"""Where model chunks lie."""

from __future__ import annotations

import pytest

from megazero.mpu.chunks import ChunkMap


def test_in_turns_and_there_and_back():
    turns, back = ChunkMap(3, 2), ChunkMap(3, 2, and_back=True)
    assert [turns.of(stage) for stage in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [back.of(stage) for stage in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert (turns.last_stage, back.last_stage, ChunkMap(3, 3, and_back=True).last_stage) == (2, 0, 2)


@pytest.mark.parametrize("and_back", [False, True])
def test_every_model_chunk_is_somewhere(and_back: bool):
    for stages in range(1, 6):
        for per_stage in range(1, 5):
            chunks = ChunkMap(stages, per_stage, and_back)
            held = [(number, stage, own) for stage in range(stages) for own, number in enumerate(chunks.of(stage))]
            assert sorted(number for number, _, _ in held) == list(range(chunks.count))
            assert all(
                chunks.holder(number) == (stage, own) and chunks.model_chunk(stage, own) == number
                for number, stage, own in held
            )
            assert all(list(chunks.of(stage)) == sorted(chunks.of(stage)) for stage in range(stages))
            if and_back:  # a micro-batch moves by one stage, or stays where it turns
                steps = [abs(chunks.holder(k)[0] - chunks.holder(k + 1)[0]) for k in range(chunks.count - 1)]
                assert all(step == ((k + 1) % stages != 0) for k, step in enumerate(steps))
