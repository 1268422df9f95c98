"""The gradients of one process against slopes of its loss.

One process runs the same backward as the ranks, so a wrong one is wrong on both. Here each parameter of one layer of
each kind, of the embedding and of the head moves a little in a direction, and the loss tells how steep it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.config.layers.kinds import layers
from megazero.model.batch import MicroBatch
from megazero.model.block import Block
from megazero.model.stage import Stage
from megazero.mpu.parameter import Parameter, ParameterSpec, spec_of
from megazero.train.job import Job
from megazero.verify.compare import FLOOR, GRADIENT, FirstDifference, Whole

STEP = 1e-6
"""How far an element moves. The loss rounds to 1e-15, so slopes are good to 1e-9, and bends add less than that."""
ALLOWED = 1e-4
"""The largest relative difference of slope and gradient. A ReLU may have its kink within a step, so the better one of
`DIRECTIONS` counts."""
DIRECTIONS = 2


@dataclass
class Slopes:
    """A prober of one process (`session.run_leg`): measures before the first step, for `compared`."""

    measured: dict[str, list[tuple[Tensor, float]]] = field(default_factory=dict)
    """By parameter: directions, flat, of -1 and 1, and the slopes there."""

    def __call__(self, job: Job, rank: int) -> None:
        """Measure at the weights and on the samples of the first step."""
        with job.state.model.reading():  # frozen matrices that are codes are there for each use only
            self._measure(job)

    def _measure(self, job: Job) -> None:
        trainer, (stage,) = job.trainer, job.stages
        batches = trainer.batches.train.micro_batches(0, job.run.schedule.global_batch_size)
        tokens = float(trainer.count(batches))
        chance = torch.Generator().manual_seed(job.run.data.seed)
        for parameter in _chosen(stage):
            spec = spec_of(parameter)
            values = parameter.data.view(-1)[: spec.stored_numel]
            slopes = self.measured.setdefault(spec.name, [])
            for _ in range(DIRECTIONS):
                direction = torch.randint(0, 2, values.shape, generator=chance).to(values.dtype) * 2 - 1
                before, sides = values.clone(), list[float]()
                for side in (STEP, -STEP):
                    values.copy_(before + side * direction)
                    sides.append(_loss(stage, batches) / tokens)
                values.copy_(before)
                decayed = float(before @ direction) * _decay(job, spec)
                slopes.append((direction, (sides[0] - sides[1]) / (2 * STEP) + decayed))

    def compared(self, true: Whole) -> tuple[FirstDifference | None, float]:
        """(the parameter whose gradient is furthest from the slopes, if any is too far; the largest relative error).
        true: the values of the first step.
        """
        expected = {
            name: [(float(true.tensors[GRADIENT][name].view(-1) @ direction), slope) for direction, slope in slopes]
            for name, slopes in self.measured.items()
        }
        largest = max((abs(slope) for pairs in expected.values() for _, slope in pairs), default=0.0)
        wrong: FirstDifference | None = None
        worst = 0.0
        for name, pairs in expected.items():
            error = min(
                abs(gradient - slope) / max(abs(slope), abs(gradient), FLOOR * largest, 1e-300)
                for gradient, slope in pairs
            )
            worst = max(worst, error)
            if error > ALLOWED and (wrong is None or error > wrong.error):
                wrong = FirstDifference(
                    name, GRADIENT, 0, "backward", 1, "on one process, which its loss contradicts", error
                )
        return wrong, worst


def _decay(job: Job, spec: ParameterSpec) -> float:
    """What the first moment has of the weights beside the gradient: the weight decay that is no decoupled one."""
    optimizer = job.run.optimizer
    return 0.0 if optimizer.optimizer == "adamw" or not spec.kind.decays else optimizer.weight_decay


def _chosen(stage: Stage) -> Iterator[Parameter]:
    """The trained parameters of the embedding, of a block of each kind, and of the head."""
    kinds, seen = set[object](), set[int]()
    for unit in stage.units():
        if isinstance(unit, Block):
            kind = layers(stage.layout.model)[unit.number]
            if kind in kinds:
                continue
            kinds.add(kind)
        for parameter in unit.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                assert isinstance(parameter, Parameter)
                yield parameter


@torch.no_grad()
def _loss(stage: Stage, batches: list[MicroBatch]) -> float:
    """The sum of the token losses as in training, with dropout, smoothing and z-loss."""
    factor = torch.ones((), dtype=torch.float64)
    return sum(float(stage(None, replace(batch, loss_factor=factor))) for batch in batches)
