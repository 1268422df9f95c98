"""megazero's step under a meter of its tensors' memory, from before the model is built: every allocation of torch's
allocator, as torch's profiler sees it. The meter knows nothing of buckets and columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch.autograd.profiler import profile

from bench.contestants.megazero_ import build_megazero
from bench.workload import Workload
from megazero.config.tiers import Tier
from megazero.pipeline.kept import HostActivations
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_memories
from megazero.program.instruction import Piece
from megazero.train.job import Job
from megazero.zero import portions


@dataclass
class Peaks:
    """By phase the largest sum of living tensors in bytes, and the sum at its end.

    alive  the sum now
    """

    alive: int = 0
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, phase: str, sizes: Iterable[int]) -> None:
        """Count allocations in bytes, and what is freed (below 0), in the order in which they happen."""
        found = self.phases.setdefault(phase, {"peak": 0, "end": 0})
        for size in sizes:
            self.alive += size
            found["peak"] = max(found["peak"], self.alive)
        found["end"] = self.alive


class Meter:
    """Meters every allocation of torch's allocator from now on.

    A profiler keeps a kilobyte and a half for each operation, so that a phase is metered in pieces.
    """

    def __init__(self) -> None:
        self.peaks = Peaks()
        self._start()

    def end(self, phase: str) -> None:
        """End a piece of a phase, and begin the next one."""
        self._profile.__exit__(None, None, None)
        assert self._profile.kineto_results is not None
        events: Any = self._profile.kineto_results.events()
        changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
        self.peaks.add(phase, (size for _, size in sorted(changes, key=lambda change: change[0])))
        self._start()

    def _start(self) -> None:
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()


def in_host_memory(job: Job) -> tuple[int, int]:
    """Bytes of what a job has allocated in host memory, and of these the ones that torch's allocator knows on a CPU."""
    model, activations = job.state.model, job.activations
    columns = sum(column.nbytes_in(Tier.HOST) for column in model.columns.values())
    kept = activations.buffers.nbytes if isinstance(activations, HostActivations) else 0
    disks = None if activations is None else activations.disks
    swaps = (model.tiers.swap, None if disks is None else disks.store)
    of_files = sum(swap.memory_bytes for swap in swaps if swap is not None)
    every = columns + model.mover.nbytes + of_files + kept
    beside_disks = [
        slot.memory[piece] for slot in model.mover.update_slots.slots for piece in (Piece.STATE, Piece.SUMS)
    ]
    direct = model.mover.load_slots.nbytes + sum(memory.nbytes for memory in beside_disks)
    return every, every - of_files - direct - kept * (disks is not None)


class Step:
    """One optimizer step under the meter."""

    def __init__(self, job: Job, meter: Meter) -> None:
        self.job, self.meter = job, meter

    def __call__(self) -> float:
        self.meter.end("between steps")
        self.job.trainer.train_step(stop=False)
        self.job.trainer.after_step()
        self.meter.end("step")
        return 0.0

    def report(self) -> dict[str, Any]:
        """Bytes: "held" by column as allocated, "predicted" by group of columns, the meter's "peaks" by phase, the
        step's peak as --memory-trace predicts it, "predicted_step", and what is taken of the "tiers" device and host.
        """
        job = self.job
        steps, at = StageLists(job.run, job.grid.axes, nccl=False), job.grid.at.pp
        memory = stage_memories(steps, "cpu")[at]
        stage, step = memory.state, memory.trace.peak
        host, seen = in_host_memory(job)
        predicted = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
        return {
            "held": job.state.model.bytes(),
            "predicted": predicted,
            "peaks": self.meter.peaks.phases,
            "predicted_step": {column.value: size for column, size in step.columns.items()},
            "tiers": {"device": self.meter.peaks.phases["step"]["peak"] - seen, "host": host},
        }


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    meter, initialise = Meter(), portions.initialise_range

    def piece(*of: Any) -> None:
        meter.end("construction")
        initialise(*of)

    with patch.object(portions, "initialise_range", piece):
        job = build_megazero(work, list(layout), replicas)
    meter.end("construction")
    return Step(job, meter)
