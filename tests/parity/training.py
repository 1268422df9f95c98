"""A training run on ranks of the pool, and its results that another layout must reproduce."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megazero.config.derive import micro_batch_order
from megazero.config.dump import changed_settings
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.connect import connect
from megazero.mpu.grid import build_grid
from megazero.plan.step_lists import StageLists
from megazero.report.run_report import RunReport, gather
from megazero.telemetry.record import StepRecord
from megazero.train.bodies import bodies_of
from megazero.train.init_from import model_source
from megazero.train.job import Job, build_job
from megazero.train.prepare import prepare
from megazero.train.report import machine_of
from tests.launches import ONE_QUEUE, RULES, Trace, check, recorded_launches
from tests.parameters import Piece, assemble, values_of, worst_difference
from tests.parity.ways import PLAIN, Way
from tests.ranks import run_ranks


def small_model(layers: int, *, heads: int) -> list[str]:
    """The flags of a model of hidden size 24 for samples of 12 tokens, with a vocabulary that no tp divides."""
    shape = {"num-layers": layers, "hidden-size": 24, "num-attention-heads": heads, "seq-length": 12}
    return [word for name, value in (shape | {"vocab-size": 1003}).items() for word in (f"--{name}", str(value))]


class Recorder:
    """A sink that keeps the records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.losses: dict[str, float] = {}

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self.losses = losses

    def note(self, text: str) -> None: ...
    def flush(self, durable: bool) -> None: ...
    def close(self) -> None: ...


@dataclass
class Outcome:
    """The results of one run: records of rank 0, validation losses by name, final weights as global tensors, and the
    settings with which it ran.
    """

    records: list[StepRecord]
    losses: dict[str, float]
    weights: dict[str, Tensor]
    run: Run | None = None


OfRank = tuple[list[StepRecord], dict[str, float], list[Piece]]
"""Records, validation losses, and a rank's pieces of the final weights."""


def job_on_rank(rank: int, size: int, flags: list[str], *, keep_log: bool = False) -> tuple[Job, Recorder]:
    """The job of this rank, as the program builds it, with a recorder instead of the sinks of its log.

    keep_log: rank 0 keeps its sinks besides the recorder, and the other ranks have none, as in a run. Only this shows
    an effect of rank 0's sinks.
    """
    run = parse_run(flags, size, model_source)
    prepared = prepare(run, size, silent)
    grid = build_grid(axes_of(prepared.run, size), "cpu", shared_memory=prepared.run.parallel.shared_memory)
    connect(grid)
    job = build_job(prepared, grid)
    recorder = Recorder()
    if not keep_log:
        job.trainer.log._sinks = (recorder,)
    elif rank == 0:
        job.trainer.log._sinks += (recorder,)
    return job, recorder


def report_of(job: Job) -> RunReport:
    """The report of a job's run, as rank 0 makes it."""
    run, grid = job.run, job.grid
    machine = machine_of(run, grid, bodies_of(run, grid.device))
    resolved = job.prepared.resolved
    report = replace(gather(StageLists(run, grid.axes, nccl=False)), machine=machine, decisions=resolved.decisions)
    return replace(report, given=changed_settings(resolved.asked), data="words", start="from scratch")


def train_on_rank(rank: int, size: int, flags: list[str], fused: str) -> OfRank:
    """Train to the end."""
    return _trained(rank, size, flags, fused, PLAIN)[0]


def _trained(rank: int, size: int, flags: list[str], fused: str, way: Way) -> tuple[OfRank, Run]:
    """The results, and the run as it was resolved."""
    with pytest.MonkeyPatch.context() as patch, way.around():
        patch.setenv("MEGAZERO_FUSED", fused)
        job, recorder = job_on_rank(rank, size, flags)
        way.begin(job, rank)
        job.fit()
    job.state.model.tiers.device.budget = None  # it is training's: here all parameters are whole at once
    with job.state.model.reading():
        weights = values_of(nn.ModuleList(job.stages))
    job.close()
    return (recorder.records, recorder.losses, weights), job.run


def recorded_on_rank(rank: int, size: int, flags: list[str], fused: str, way: Way) -> tuple[tuple[OfRank, Run], Trace]:
    """`train_on_rank`, the run as it was resolved, and its launches."""
    with recorded_launches() as trace:
        return _trained(rank, size, flags, fused, way), trace


def train(size: int, flags: list[str], fused: str | None = None, *, way: Way = PLAIN) -> Outcome:
    """The results of a run on `size` ranks. fused: the value of MEGAZERO_FUSED; None: that of the environment.

    Fails if replicas of a parameter are not equal to the bit, or if ranks launch collectives or messages in orders with
    which NCCL could hang (`tests.launches`).
    """
    fused = fused or os.environ.get("MEGAZERO_FUSED", "auto")
    results = run_ranks(size, recorded_on_rank, size, flags, fused, way)
    ((records, losses, _), run), _ = results[0]
    # Several chunks on a stage, and vertical order, may hang in one hardware queue: see
    # tests/pipeline/test_one_queue.py and tests/program/test_vertical.py.
    may_hang = run.parallel.virtual_stages > 1 or micro_batch_order(run) == "vertical"
    if not way.late:  # what comes late is waited for where it is launched
        check([trace for _, trace in results], RULES.keys() - {ONE_QUEUE} if may_hang else RULES)
    return Outcome(records, losses, assemble([pieces for ((_, _, pieces), _), _ in results]), run)


def unequal(ours: Outcome, theirs: Outcome, norm: float = 0.0) -> list[str]:
    """What is not the same to the bit: a step's numbers, validation losses, weights. norm: relative difference that
    gradient norms may have.
    """
    names = [
        f"{key} of step {one.iteration}: {getattr(one, key)!r} and {getattr(other, key)!r}"
        for one, other in zip(ours.records, theirs.records, strict=True)
        for key in ("iteration", "loss", "grad_norm", "lr", "loss_scale", "skipped")
        if repr(getattr(one, key)) != repr(getattr(other, key))  # NaN is NaN
        and not (key == "grad_norm" and math.isclose(one.grad_norm, other.grad_norm, rel_tol=norm))
    ]
    names += [f"losses: {ours.losses} and {theirs.losses}"] * (ours.losses != theirs.losses)
    assert ours.weights.keys() == theirs.weights.keys()
    return names + [name for name, weight in theirs.weights.items() if not torch.equal(ours.weights[name], weight)]


def worst(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """The largest relative difference of losses, gradient norms, validation losses and weights."""

    def series(key: str) -> float:
        pairs = [(getattr(a, key), getattr(b, key)) for a, b in zip(ours.records, theirs.records, strict=True)]
        return max(abs(a - b) for a, b in pairs) / max(abs(b) for _, b in pairs)

    assert ours.losses.keys() == theirs.losses.keys()
    valid = max((abs(ours.losses[name] - loss) / abs(loss) for name, loss in theirs.losses.items()), default=0.0)
    weights, _ = worst_difference(ours.weights, theirs.weights)
    return {"loss": series("loss"), "grad_norm": series("grad_norm"), "valid": valid, "weights": weights}


def data_flags(corpus: Path, cache: Path) -> list[str]:
    """The flags of the data."""
    return ["--data-path", str(corpus), "--data-cache-path", str(cache), "--split", "90,10,0", "--eval-iters", "1"]
