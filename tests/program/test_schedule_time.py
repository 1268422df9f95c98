"""The time of a schedule by its graph against the simulation of its lists."""

from __future__ import annotations

import pytest

from megazero.pipeline.schedule import make_orders, make_schedule
from megazero.program.instruction import ProgramError
from megazero.program.schedule_time import ScheduleGraph
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes

SCHEDULES = (
    ("1f1b", 4, 1, 9),
    ("1f1b", 5, 1, 2),
    ("interleaved", 3, 4, 10),
    ("gpipe", 3, 2, 5),
    ("zb-h1", 6, 1, 13),
    ("zb-v", 4, 2, 11),
    ("1f1b", 1, 1, 3),
)


def graph_of(name: str, stages: int, micro_batches: int, virtual: int) -> ScheduleGraph:
    orders, chunks = make_orders(name, stages, micro_batches, virtual)
    return ScheduleGraph.of(orders, [chunks.of(stage) for stage in range(stages)])


def uneven(chunks: int, message: float, *, split: bool) -> ChunkTimes:
    """Times of which no two are equal."""
    forward = tuple(1.0 + 0.07 * (n * n % 7) + 0.011 * n for n in range(chunks))
    backward = tuple(2.0 + 0.05 * (n * 3 % 5) + 0.013 * n for n in range(chunks))
    return ChunkTimes(forward, backward, message, tuple(0.4 * time for time in backward) if split else None)


@pytest.mark.parametrize("message", [0.0, 0.03, 0.9, 4.1])
@pytest.mark.parametrize(("name", "stages", "virtual", "micro_batches"), SCHEDULES)
def test_the_graph_says_what_the_simulation_says(
    name: str, stages: int, virtual: int, micro_batches: int, message: float
) -> None:
    times = uneven(stages * virtual, message, split=name.startswith("zb"))
    simulated = simulate(make_schedule(name, stages, micro_batches, virtual), times)
    assert graph_of(name, stages, micro_batches, virtual).seconds(times) == pytest.approx(simulated.ends[-1], rel=1e-12)
    assert simulated.ends[-1] > micro_batches * max(times.forward)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    (first, last), chunks = make_orders("1f1b", 2, 3)
    with pytest.raises(ProgramError, match="never runs"):
        ScheduleGraph.of([first[::-1], last], [chunks.of(0), chunks.of(1)])
