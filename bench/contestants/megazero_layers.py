"""megazero's own layers as a user's modules in `megazero.engine`: what is left beside our own stages is the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import megazero
from bench.contestants.common import Step, own_folder, rank
from bench.contestants.megazero_ import flags_of
from bench.contestants.megazero_own import engine_of
from bench.workload import Batches, Workload
from megazero.config.parse import parse_run
from megazero.model.batch import MicroBatch
from megazero.model.stage import initialise
from megazero.mpu.grid import single_rank_group
from megazero.own.units.model import BatchTensors
from megazero.pipeline.build import stages_of
from megazero.train.init_from import model_source

PRECISIONS = ("bf16", "fp32")


class FirstLayer(nn.Module):
    """The embedding."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, batch: BatchTensors) -> Tensor:
        made: Tensor = self.layer(micro_batch(batch))
        return made


class LaterLayer(FirstLayer):
    """A block."""

    def forward(self, hidden: Tensor, batch: BatchTensors) -> Tensor:  # type: ignore[override]
        made: Tensor = self.layer(hidden, micro_batch(batch))
        return made


class LastLayer(LaterLayer):
    """The head, whose loss is a sum over tokens."""

    def forward(self, hidden: Tensor, batch: BatchTensors) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(hidden, batch), batch["labels"].numel()


def micro_batch(batch: BatchTensors) -> MicroBatch:
    """What a layer takes. Without a loss scale the backward of an engine starts with 1, which the head has to know."""
    tokens = batch["tokens"]
    return MicroBatch(tokens, batch["labels"], None, torch.arange(len(tokens)), loss_factor=torch.ones(()))


def as_users(module: nn.Module) -> None:
    """Have plain parameters of torch, as a user's module has."""
    made = dict[int, nn.Parameter]()
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = made.setdefault(id(parameter), nn.Parameter(parameter.detach()))


def model_of(work: Workload) -> megazero.Model:
    """The model of `megazero_`, as units."""
    run = parse_run(flags_of(work, own_folder(), 1), 1, model_source)
    (stage,) = stages_of(run, 0, single_rank_group(), torch.device(work.device))
    initialise(stage, seed=1)
    as_users(stage)
    first, *blocks, last = stage.units()
    return megazero.Model([FirstLayer(first), *map(LaterLayer, blocks), LastLayer(last)])


def build(work: Workload, run: dict[str, Any]) -> Step:
    """run: the layout, as fields of a run."""
    batches, engine = Batches(work, rank()), engine_of(model_of(work), work, run)

    def step() -> Tensor:
        pairs = [batches() for _ in range(work.micro_batches)]
        return engine.step([{"tokens": tokens, "labels": labels} for tokens, labels in pairs]).loss

    return step
