"""megazero's step under a meter of its tensors' memory, from before the model is built: every allocation of torch's
allocator, as torch's profiler sees it. The meter knows nothing of buckets and columns.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.contestants.megazero_ import build_megazero
from bench.workload import Workload
from megazero.plan.bytes import stage_bytes
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_trace
from megazero.train.job import Job

PHASES = ("construction", "step")


def peaks(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """From a trace that begins before the first tensor: by phase the largest sum of living tensors in bytes, and the
    sum at its end. Phases are spans of the trace; of several with one name all count.
    """
    every = list(events)
    changes = sorted((event for event in every if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    alive = list(accumulate((change["args"]["Bytes"] for change in changes), initial=0))
    found: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        spans = [event for event in every if event.get("name") == phase and event.get("cat") == "user_annotation"]
        inside = [
            number
            for number, change in enumerate(changes)
            if any(0 <= change["ts"] - span["ts"] <= span["dur"] for span in spans)
        ]
        found[phase] = {
            "peak": max((alive[number + 1] for number in inside), default=0),
            "end": alive[inside[-1] + 1] if inside else 0,
        }
    return found


class Step:
    """One optimizer step under the meter. `report` ends the metering."""

    def __init__(self, job: Job, meter: profile) -> None:
        self.job, self.meter = job, meter

    def __call__(self) -> float:
        with record_function("step"):
            self.job.trainer.train_step(stop=False)
            self.job.trainer.after_step()
        return 0.0

    def report(self) -> dict[str, Any]:
        """Bytes: "held" by column as allocated, "predicted" by group of columns, the meter's "peaks" by phase, and the
        step's peak as --memory-trace predicts it, "predicted_step".
        """
        self.meter.stop()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self.meter.export_chrome_trace(file.name)
            metered = peaks(json.loads(Path(file.name).read_text())["traceEvents"])
        job = self.job
        steps, at = StageLists(job.run, job.grid.axes, nccl=False), job.grid.at.pp
        stage = stage_bytes(job.run, job.grid.axes)[at]
        step = stage_trace(steps, at, stage, "cpu").peak
        predicted = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
        return {
            "held": job.state.model.bytes(),
            "predicted": predicted,
            "peaks": metered,
            "predicted_step": {column.value: size for column, size in step.columns.items()},
        }


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    meter = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    meter.start()
    with record_function("construction"):
        job = build_megazero(work, list(layout), replicas)
    return Step(job, meter)
