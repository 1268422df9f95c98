"""A small run on ranks that are threads, and the values that it has between its steps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.config.schema import Run
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.mpu.axes import Axes
from megazero.mpu.parameter import Parameter, ParameterSpec, spec_of
from megazero.train.job import Job, build_job
from megazero.train.prepare import Prepared, prepare
from megazero.verify.data import ProofRows
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
    owned: tuple[Held, ...] = ()
    whole: tuple[Held, ...] = ()
    valid_loss: float | None = None


@dataclass(frozen=True)
class Leg:
    """A part of a proof: so many steps from a start.

    steps  the last step of this leg; each step's number counts from the start of the run
    clip   the largest norm from a step on, by step; before the first there is no clipping
    load   the folder of the checkpoint to begin with; None: from the seed
    save   the folder to save into at the end
    looks  the steps after which the state is looked at
    evaluates  whether the last step is followed by an evaluation
    """

    steps: int
    clip: Mapping[int, float]
    load: Path | None = None
    save: Path | None = None
    looks: frozenset[int] = frozenset()
    evaluates: bool = False


def rows_of(run: Run, steps: int) -> OwnData:
    """The samples of a small run and of its evaluation."""
    length, vocabulary, batch = run.model.seq_length, run.model.vocab_size, run.schedule.global_batch_size
    assert vocabulary is not None
    train = ProofRows(run.data.seed, length, vocabulary, batch * (steps + 2))
    return OwnData(train, {"valid_loss": ProofRows(run.data.seed + 1, length, vocabulary, batch)})


def prepared_leg(run: Run, axes: Axes, leg: Leg, steps: int) -> Prepared:
    """The run of a leg, resolved and checked. steps: of the longest leg. Raises ConfigError."""
    checkpoint = replace(
        run.checkpoint,
        save=None if leg.save is None else str(leg.save),
        load=None if leg.load is None else str(leg.load),
    )
    return prepare(replace(run, checkpoint=checkpoint), axes.world_size, silent, rows_of(run, steps))


Prober = Callable[[Job, int], None]
"""Called with the job of a rank and its number, before its first step."""


def run_leg(
    run: Run, axes: Axes, leg: Leg, *, as_nccl: bool, steps: int, prober: Prober | None = None
) -> list[list[Values]]:
    """The values of all ranks, by rank, after each step of a leg.

    Raises ConfigError for a small run that cannot be run, RankFailed and Standstill.
    """
    prepared = prepared_leg(run, axes, leg, steps)
    world = LocalWorld(axes, as_nccl=as_nccl and axes.world_size > 1)
    with redirect_stdout(io.StringIO()):  # the banner and the lines of steps
        return world.turns.run(lambda rank: _leg_on_rank(prepared, world, rank, leg, prober))


def _leg_on_rank(prepared: Prepared, world: LocalWorld, rank: int, leg: Leg, prober: Prober | None) -> list[Values]:
    with closing(build_job(prepared, world.grid(rank))) as job:
        if prober is not None:
            prober(job, rank)
        trainer, values = job.trainer, list[Values]()
        while trainer.position.iteration < leg.steps:
            number = trainer.position.iteration + 1
            clip = next((most for first, most in sorted(leg.clip.items(), reverse=True) if number >= first), 0.0)
            trainer.run = replace(trainer.run, optimizer=replace(trainer.run.optimizer, clip_grad=clip))
            step = trainer.train_step(stop=False)
            now = Values(number, float(step.loss), float(step.grad_norm), step.lr, bool(step.skipped))
            if number in leg.looks:
                now = replace(now, owned=_owned(job), whole=_whole(job))
            if number == leg.steps and leg.evaluates:
                now = replace(now, valid_loss=trainer.evaluate()["valid_loss"])
            values.append(now)
        if leg.save is not None:
            trainer.save(last=True)
        trainer.batches.close()
        return values


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


def global_tensors(values: Sequence[Held]) -> dict[tuple[str, str], Tensor]:
    """(parameter, column) -> the global tensor, from what the only rank of a run holds."""
    made: dict[tuple[str, str], Tensor] = {}
    for held in values:
        for column, part in held.columns.items():
            whole = made.setdefault(
                (held.spec.name, column), torch.full(held.spec.shape, math.nan, dtype=part.dtype).view(-1)
            )
            whole[held.start : held.stop] = part
    return {
        (held.spec.name, column): made[held.spec.name, column].view(held.spec.shape)
        for held in values
        for column in held.columns
    }
