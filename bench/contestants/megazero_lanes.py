"""megazero's step with the times at which every instruction was at work on its lane. Nothing of it is in the program:
the methods that do the work are wrapped from outside.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.contestants.megazero_ import build_megazero, step_of
from bench.workload import Workload
from megazero.disk.lanes import Need
from megazero.pipeline.schedule_run import ScheduleRun
from megazero.program.instruction import UPDATE_HOST, Op, Piece
from megazero.system.copy_thread import CopyThread
from megazero.train.job import Job
from megazero.zero.actions import BucketActions
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.parts import piece_name

COMPUTES = tuple(op.value for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
"""The names of computations in spans."""
MAIN, READS, WRITES, UPDATES, COPIES = "program", "from disk", "to disk", "host", "copies"
WAIT = "WAIT"
"""The program waits for parameters."""


@dataclass
class Recorder:
    """Spans of work: (lane, what, begin, end) in seconds of `time.perf_counter`."""

    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    def timed(self, lane: str, what: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is recorded whenever it is called."""

        def outer(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                self.spans.append((lane, what, begin, time.perf_counter()))

        return outer

    def wrap(self, job: Job) -> None:
        """Record a job from now on."""
        begin, tiers, adam = ScheduleRun.begin, job.state.model.tiers, ShardedOptimizer.update_part

        def begun(run: ScheduleRun, *args: Any) -> None:
            run.actions = {op: self.timed(MAIN, op.value, action) for op, action in run.actions.items()}
            begin(run, *args)

        ScheduleRun.begin = begun  # type: ignore[method-assign, assignment]
        ShardedOptimizer.update_part = self.timed(UPDATES, UPDATE_HOST.value, adam)  # type: ignore[method-assign]
        BucketActions.ready = self.timed(MAIN, WAIT, BucketActions.ready)  # type: ignore[method-assign]
        for thread in (tiers.to_host, tiers.to_device):
            assert isinstance(thread, CopyThread)
            self._wrap_copies(thread)
        if tiers.swap is not None:
            submit = tiers.swap._lanes.submit

            def submitted(write: bool, work: Any, *args: Any) -> Any:
                return submit(write, self.timed(WRITES if write else READS, "move", work), *args)

            tiers.swap._lanes.submit = submitted  # type: ignore[method-assign, assignment]

    def _wrap_copies(self, thread: CopyThread) -> None:
        behind = thread._copies.behind_now
        thread._copies.behind_now = lambda: self.timed(COPIES, "copy", behind())  # type: ignore[method-assign]


class Step:
    """One optimizer step, recorded. The report has what happened since the last one."""

    def __init__(self, job: Job) -> None:
        self.job, self.step, self.recorder = job, step_of(job.trainer), Recorder()
        self.steps: list[tuple[float, float]] = []
        self.began = processor()
        self.recorder.wrap(job)
        self.moved = self._moved()

    def __call__(self) -> Any:
        begin = time.perf_counter()
        loss = self.step()
        self.steps.append((begin, time.perf_counter()))
        return loss

    def report(self) -> dict[str, Any]:
        """spans, steps [(begin, end)] in seconds, processor seconds of all steps, bytes read and written in them, and
        the seconds of state alone that is read and written: with its bytes.
        """
        spent = processor() - self.began
        moved = [now - before for now, before in zip(self._moved(), self.moved, strict=True)]
        self.job.state.model.wait_parameters()
        found = {
            "spans": list(self.recorder.spans),
            "steps": self.steps,
            "processor": spent,
            "moved": moved,
            "alone": self.io_alone(),
        }
        self.recorder.spans.clear()
        self.steps, self.moved, self.began = [], self._moved(), processor()
        return found

    def io_alone(self) -> tuple[float, int]:
        """Seconds in which all optimizer state is read and written once, part by part through the slots of a step, with
        nothing beside it, and its bytes both ways.
        """
        model = self.job.state.model
        if model.tiers.swap is None:
            return 0.0, 0
        parts = [(bucket, part) for bucket, rests in enumerate(model.resting) for part in range(len(rests.parts))]
        before, begin, ends = sum(self._moved()), time.perf_counter(), list[Need]()
        slots = model.mover.update_slots.slots
        for turn, key in enumerate(parts):
            slot, needs = slots[turn % len(slots)], ends[-len(slots) :][:1] if len(ends) >= len(slots) else []
            start, stop, _ = model.resting[key[0]].parts[key[1]]
            memory = slot.of(Piece.STATE, (stop - start) * model.mover.state_bytes)
            piece = {piece_name(Piece.STATE, key): memory}
            read = model.tiers.swap.read(piece, needs=needs)
            ends.append(model.tiers.swap.write(piece, needs=[read.wait]).wait)
        for end in ends:
            end()
        return time.perf_counter() - begin, sum(self._moved()) - before

    def _moved(self) -> tuple[int, int]:
        swap = self.job.state.model.tiers.swap
        return (0, 0) if swap is None else (swap.bytes_read, swap.bytes_written)


def processor() -> float:
    """Processor seconds of this process."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    return Step(build_megazero(work, list(layout), replicas))
