"""Messages of every schedule end where each channel has a stream of its own; and which schedules may hang where a card
has one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), as docs/reference/environment.md says.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megazero.pipeline.schedule import make_schedule
from megazero.program.instruction import Instruction, Op
from tests.launches import MESSAGES, ONE_QUEUE, Launch, Line, Trace, deadlock, differences

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)]


def messages(stage: int, instructions: Sequence[Instruction]) -> Trace:
    """What a stage launches and waits for, as `ScheduleRun` does."""
    events: list[Launch | int] = []
    posted: dict[tuple[bool, int, int], int] = {}
    for i in instructions:
        key = i.is_backward, i.micro_batch, i.chunk
        if i.is_compute:
            events += [posted.pop(key)] if key in posted and i.op is not Op.BACKWARD_WEIGHT else []
            continue
        if not i.is_send:
            posted[key] = len(events)
        line = Line((stage, i.peer) if i.is_send else (i.peer, stage), MESSAGES[i.is_backward])
        events.append(Launch(line, f"boundary {i.boundary}, micro-batch {i.micro_batch}"))
    return {"MainThread": events}


def hangs(name: str, chunks: int, rule: str) -> set[tuple[int, int]]:
    """The (stages, micro-batches) at which ranks stop for ever."""
    found = set()
    for pp in range(2, 9):
        for m in range(1, 17):
            traces = [messages(stage, own) for stage, own in enumerate(make_schedule(name, pp, m, chunks))]
            assert not differences(traces)
            if deadlock(traces, rule):
                found.add((pp, m))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_messages_end_on_streams(name: str, chunks: int) -> None:
    assert not hangs(name, chunks, "streams")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_only_chunks_in_a_ring_hang_in_one_queue(name: str, chunks: int) -> None:
    """A stage's sends go to the stage that follows, and lie before its receive of what comes round the ring."""
    found = hangs(name, chunks, ONE_QUEUE)
    if name == "gpipe" and chunks == 2:
        assert {(2, m) for m in range(6, 17)} <= found and (2, 5) not in found
    elif name == "interleaved":
        assert found == {(4, 11), (5, 13), (5, 14), (6, 15), (6, 16)}, "where pp does not divide the micro-batches"
    else:
        assert not found
