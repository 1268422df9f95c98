"""A small run on ranks that are threads, and the values that it has between its steps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.config.schema import Run
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.parameter import Parameter, ParameterSpec, spec_of
from megazero.pipeline.stage_specs import specs_of_stage
from megazero.train.job import Job, build_job
from megazero.train.prepare import Prepared, prepare
from megazero.verify.data import ProofRows, packed
from megazero.verify.lanes import ALL_LATE, Late, put_in_order
from megazero.verify.local import LocalWorld


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter: elements [start, stop) of the flat box of `spec`, by column. `owned`: it is the
    rank that updates them; else these are its parameters as the next forward reads them, whole.
    """

    spec: ParameterSpec
    start: int
    stop: int
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class Values:
    """The values of a rank after a step: its numbers, what it owns of the state, and its whole parameters."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    clip: float
    owned: tuple[Held, ...] = ()
    whole: tuple[Held, ...] = ()
    valid_loss: float | None = None


EVERY_STEP = frozenset((1, 2, 3, 4))


@dataclass(frozen=True)
class Leg:
    """A part of a proof: steps from a start.

    name       in words
    last       the last step; steps are counted from the start of the run
    clip       the largest norm of step `CLIPPED`; None: half of the norm of the step before. Others are not clipped
    load       the folder of the checkpoint to begin with; None: from the seed, or from `base`
    save       the folder to save into after step `SAVED`
    looks      the steps after which the state is looked at
    replica    whether a parameter that all tp ranks have is spoiled in step `SPOILED`, and not the last matrix
    base       the folder of the weights beneath adapters
    late       which lanes beside the program are late ones
    packed     whether samples are packed, as conversations are
    """

    name: str
    last: int = 3
    clip: float | None = None
    load: Path | None = None
    save: Path | None = None
    looks: frozenset[int] = EVERY_STEP
    base: Path | None = None
    replica: bool = False
    late: Late = ALL_LATE
    packed: bool = False


SAVED, CLIPPED, SPOILED = 2, 3, 4
"""The step behind which a run is evaluated and saved, the one behind it, which clips and may be another start's, and a
step in which a gradient of the last rank is infinite, so that all ranks have to skip it.
"""


def rows_of(run: Run) -> OwnData:
    """The samples of a small run and of its evaluation."""
    length, vocabulary, batch = run.model.seq_length, run.model.vocab_size, run.schedule.global_batch_size
    assert vocabulary is not None
    train = ProofRows(run.data.seed, length, vocabulary, batch * SPOILED)
    return OwnData(train, {"valid_loss": ProofRows(run.data.seed + 1, length, vocabulary, batch)})


def prepared_leg(run: Run, axes: Axes, leg: Leg) -> Prepared:
    """The run of a leg, resolved and checked. Raises ConfigError."""
    save, load, base = (None if folder is None else str(folder) for folder in (leg.save, leg.load, leg.base))
    checkpoint = replace(run.checkpoint, save=save, load=load, init_from=base)
    prepared = prepare(replace(run, checkpoint=checkpoint), axes.world_size, silent, rows_of(run))
    return replace(prepared, datasets=packed(prepared.datasets)) if leg.packed else prepared


Prober = Callable[[Job, int], None]
"""Called with the job of a rank and its number, before its first step."""


def run_leg(
    run: Run, axes: Axes, leg: Leg, collected: list[list[Values]], *, as_nccl: bool, prober: Prober | None = None
) -> None:
    """Run a leg on all ranks.

    collected: gets a list for each rank, of the values after each of its steps, those before an error too. as_nccl: as
    in `LocalWorld`. Raises ConfigError for a small run that cannot be run, RankFailed and Standstill.
    """
    collected[:] = [[] for _ in range(axes.world_size)]
    prepared = prepared_leg(run, axes, leg)
    world = LocalWorld(axes, as_nccl=as_nccl and axes.world_size > 1)
    with redirect_stdout(io.StringIO()):  # the banner and the lines of steps
        world.turns.run(lambda rank: _leg_on_rank(prepared, world, rank, leg, collected[rank], prober))


def _leg_on_rank(
    prepared: Prepared, world: LocalWorld, rank: int, leg: Leg, values: list[Values], prober: Prober | None
) -> None:
    with closing(build_job(prepared, world.grid(rank))) as job:
        put_in_order(job, leg.late)
        if prober is not None:
            prober(job, rank)
        trainer = job.trainer
        if trainer.save_policy is not None:
            trainer.save_policy.pauses = (0.0,)  # what fails on these folders fails again
        if leg.last == 0:
            trainer.save(last=True)
        if rank == _spoiled_rank(job):
            _spoil(job, replica=leg.replica)
        for number in range(trainer.position.iteration + 1, leg.last + 1):
            clip = 0.0
            if number == CLIPPED:
                clip = values[-1].grad_norm / 2 if leg.clip is None else leg.clip
            trainer.run = replace(trainer.run, optimizer=replace(trainer.run.optimizer, clip_grad=clip))
            step = trainer.train_step(stop=False)
            now = Values(number, float(step.loss), float(step.grad_norm), step.lr, bool(step.skipped), clip)
            if number in leg.looks:
                now = replace(now, owned=_owned(job), whole=_whole(job))
            values.append(now)
            trainer.after_step()  # which evaluates and saves at intervals, of which the small run has none
            if number == SAVED:
                values[-1] = replace(now, valid_loss=trainer.evaluate()["valid_loss"])
                trainer.save(last=True)
        trainer.batches.close()


class _Infinite:
    """The gradient target of a parameter whose gradient is infinite in step `SPOILED`."""

    def __init__(self, job: Job, target: GradientTarget) -> None:
        self.job, self.target = job, target

    def add(self, write: Write) -> None:
        """See `GradientTarget.add`."""

        def write_and_spoil(into: Tensor, add: bool) -> None:
            write(into, add)
            if self.job.trainer.position.iteration + 1 == SPOILED:
                into.fill_(math.inf)

        self.target.add(write_and_spoil)


def _spoiled_rank(job: Job) -> int:
    """The last rank, or with adapters the last one that has some: a stage may have the head alone."""
    run, axes = job.run, job.grid.axes
    stages = [n for n in range(axes.pp) if any(spec.blocks for spec in specs_of_stage(run, n))]
    stage = axes.pp - 1 if run.lora.lora_rank is None else stages[-1]
    return axes.rank(Coordinates(stage, axes.dp - 1, axes.cp - 1, axes.tp - 1))


def _spoil(job: Job, *, replica: bool) -> None:
    """Have a gradient of this rank be infinite in step `SPOILED`: of the last matrix, or of the last parameter that all
    tp ranks have, if there is one. What autograd accumulates and what a layer writes itself is spoiled.
    """
    parameters = [p for p in nn.ModuleList(job.stages).parameters() if isinstance(p, Parameter) and p.requires_grad]
    replicas = [p for p in parameters if not p.spec.tp_sharded] if replica else []
    chosen = (replicas or [p for p in parameters if p.dim() == 2])[-1]
    chosen.gradient_target = _Infinite(job, chosen.gradient_target)

    def spoiled(gradient: Tensor | None) -> Tensor | None:
        now = job.trainer.position.iteration + 1 == SPOILED
        return torch.full_like(gradient, math.inf) if now and gradient is not None else None

    chosen.register_hook(spoiled)


def _owned(job: Job) -> tuple[Held, ...]:
    portions = job.state.optimizer.portions()
    return tuple(
        Held(piece.spec, piece.start, piece.stop, {name: values.clone() for name, values in piece.columns.items()})
        for portion in portions
        for piece in portion
    )


def _whole(job: Job) -> tuple[Held, ...]:
    """The parameters of a rank, without padding, each once."""
    seen: dict[int, Held] = {}
    with job.state.model.reading():
        for parameter in nn.ModuleList(job.stages).parameters():
            assert isinstance(parameter, Parameter)
            spec = spec_of(parameter)
            flat = parameter.detach().reshape(-1)[: spec.stored_numel].clone()
            seen.setdefault(id(parameter), Held(spec, 0, spec.stored_numel, {"parameter": flat}))
    return tuple(seen.values())
