"""How long the checker of lists takes: a model of 126 blocks on 16,384 ranks, 16 stages x 8 tp indexes x 128 replicas.

    python -m bench.check_lists

All replicas of a role run one list, and all tp indexes of a stage have the same one, so 16 lists are walked through and
run against each other.
"""

from __future__ import annotations

import time

from megazero.pipeline.schedule import chunk_map, make_schedule
from megazero.program.checker import Role, check
from megazero.program.example import PARAMETER_BYTES, ExampleModel
from megazero.program.instruction import Instruction
from megazero.program.shape import RankShape
from megazero.program.step import StepOptions, training_step

BLOCKS, PP, TP, DP, SHARDS = 126, 16, 8, 128, 64
CASES = (
    ("1f1b", 1, 1, 256),
    ("1f1b", 1, 3, 256),
    ("zb-v", 2, 3, 256),
    ("interleaved", 7, 1, 256),
    ("interleaved", 7, 3, 256),
    ("interleaved", 4, 3, 512),
)
"""(schedule, chunks per stage, ZeRO stage, micro-batches)"""


def seconds_of(name: str, virtual: int, zero: int, micro_batches: int) -> tuple[int, float, float]:
    """(instructions of all stages, seconds to make their lists, seconds to check them)."""
    chunks = chunk_map(name, PP, virtual)
    each, left = divmod(BLOCKS, chunks.count)
    blocks = (each + 1,) * left + (each,) * (chunks.count - left)
    model = ExampleModel(blocks, zero, SHARDS, DP // SHARDS)
    began = time.perf_counter()
    lists: dict[Role, tuple[Instruction, ...]] = {}
    shapes: dict[Role, RankShape] = {}
    options = StepOptions(reduce_every=zero >= 2, gathered_bytes=2 * PARAMETER_BYTES)
    for stage, schedule in enumerate(make_schedule(name, PP, micro_batches, virtual)):
        shape = model.shape(chunks.of(stage))
        listed = training_step(schedule, shape, options)
        lists |= {(stage, index): listed for index in range(TP)}
        shapes |= {(stage, index): shape for index in range(TP)}
    made = time.perf_counter()
    check(lists, shapes, micro_batches, dict.fromkeys(lists, 2 * PARAMETER_BYTES))
    return sum(len(lists[stage, 0]) for stage in range(PP)), made - began, time.perf_counter() - made


def main() -> None:
    print("| schedule | chunks per stage | ZeRO | micro-batches | instructions | made in | checked in |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        count, made, checked = seconds_of(*case)
        print(f"| {' | '.join(map(str, case))} | {count:,} | {made:.1f} s | {checked:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
