"""The command `megazero`, which also writes down how each step's time was spent.

    python -m bench.recorded SPLIT.json pretrain FLAGS ...

Nothing of it is in the program: methods are wrapped from outside (`contestants.megazero_lanes`). Seconds of a step:

step      all of it
computes  forwards and backwards, but for their waiting
waits     the program waits for parameters
reads     from disks, on a lane beside the program
writes    to disks, on another one
adam      updates in host memory, on a third
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megazero.system.allocator import restart_with_settings

PARTS = ("step", "computes", "waits", "reads", "writes", "adam")

TimedSpan = tuple[str, str, float, float]
"""(lane, what, begin, end) in seconds."""


def split(spans: Iterable[TimedSpan], begin: float, end: float) -> dict[str, float]:
    """Seconds of each of `PARTS` between two moments. Lanes work at once, so they do not add up to the step."""
    from bench.contestants.megazero_lanes import COMPUTES, READS, UPDATES, WAIT, WRITES
    from bench.overlap import merged, shared

    inside = [(on, what, max(a, begin), min(b, end)) for on, what, a, b in spans if a < end and begin < b]

    def of(*names: str) -> list[tuple[float, float]]:
        return merged((a, b) for on, what, a, b in inside if on in names or what in names)

    def length(found: list[tuple[float, float]]) -> float:
        return sum(b - a for a, b in found)

    computes, waits = of(*COMPUTES), of(WAIT)
    seconds = end - begin, length(computes) - shared(computes, waits), *map(length, (waits, of(READS), of(WRITES)))
    return dict(zip(PARTS, (*seconds, length(of(UPDATES))), strict=True))


def record(job: Any, into: Path) -> None:
    """Record a job that will train. Each step replaces the file, which has the steps until then."""
    from bench.contestants.megazero_lanes import Recorder

    recorder, inner, found = Recorder(), job.trainer.train_step, list[dict[str, float]]()
    recorder.wrap(job)

    def step(**named: Any) -> Any:
        begin = time.perf_counter()
        values = inner(**named)
        found.append(split(recorder.spans, begin, time.perf_counter()))
        recorder.spans.clear()
        into.write_text(json.dumps(found))
        return values

    job.trainer.train_step = step


def main() -> None:
    into, sys.argv = Path(sys.argv[1]), ["megazero", *sys.argv[2:]]
    restart_with_settings()  # before torch is imported; this command starts once more
    from megazero.train import job as jobs

    build = jobs.build_job

    def built(*of: Any) -> Any:
        job = build(*of)
        if job.state.model.tiers.swap is not None:
            record(job, into)
        return job

    jobs.build_job = built  # type: ignore[assignment]
    runpy.run_module("megazero", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
