"""Training of a user's modules: `engine` takes a model, and a step takes micro-batches.

The parts of a step are those of `megazero.pretrain`: the program of instructions, the model state in buckets, the
schedules. They know nothing of GPT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megazero.mpu.bundle import MessageSpec
from megazero.own.engine_state import EngineState, StepLoop, StepResult
from megazero.own.named_groups import GivenGroups
from megazero.own.opening import Opening, made_with, opening_of
from megazero.own.planned_memory import MeasuredStep
from megazero.own.shaped_engine import ShapedEngine
from megazero.own.torch_rule import MakeOptimizer
from megazero.own.unit_times import unit_seconds
from megazero.own.units.model import BatchTensors, Model
from megazero.own.units.refusals import (
    GivenBatches,
    learning_rate,
    micro_batches,
    require_same_batches,
)
from megazero.own.units.stage import OwnBatch, boundaries
from megazero.own.units.taken_tensors import META
from megazero.pipeline.engine import PipelineEngine
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import OwedStepEnd


class Engine(EngineState):
    """A model in training on this rank, with its part of the units and of the model state.

    Made by `megazero.engine`. It is a context, which ends its process groups; `close` does, too.

    steps                  number of steps that were made, those before a load included
    rank                   this rank's number among all
    data_rank, data_ranks  which micro-batches are this rank's: those of one of so many parts of a batch. All stages
                           of a part take the same
    """

    def __init__(self, model: Model, opening: Opening, loop: StepLoop | None = None) -> None:
        super().__init__(model, opening, loop)
        self._called, self._compared = model.called_units, set[str]()
        self.steps_engine = ShapedEngine(
            self.stages,
            self._made_for,
            self._forget_gradients,
            lambda: self.state.reducer.taken,
            is_cut=len(self._placed.chunks) > 1,
        )

    def step(self, batches: GivenBatches, lr: float | None = None) -> StepResult:
        """Make one optimizer step.

        batches  this rank's micro-batches, by name of their tensors, each of the same shapes: as many on every rank.
                 One mapping is one micro-batch
        lr       the learning rate of this step; None: the last one

        A collective of all ranks. Raises ValueError with a unit's name for what the unit returns.
        """
        self.require_own_loop("step")
        self.require_as_before()
        self.lr = self.lr if lr is None else learning_rate(lr)
        taken, engine = self._taken(batches, "step"), self.steps_engine
        engine.warm_up(taken, self.scaler.scale)
        end = self._begin_step(self.counted, reports=self.reports_loss)
        engine.train(taken, end.scale, end, owed=end.values is not None)
        return self._end_step(end)

    def evaluate(self, batches: GivenBatches) -> Tensor:
        """The mean loss of micro-batches, as of `step`, with the modules in evaluation mode. A collective of all
        ranks.
        """
        taken, engine = self._taken(batches, "evaluation"), self.steps_engine
        loss = engine.evaluate(taken)
        total, number = self._reduce(loss if self.reports_loss else 0.0, self.counted)
        return total / number

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's losses enter the sum over ranks: all tp ranks of the last stage have the same ones."""
        return self.steps_engine.has_loss and self.grid.tp.index == 0

    @property
    def counted(self) -> Tensor | float:
        """What the losses that this rank reports are a sum over, once they are computed."""
        return self.steps_engine.counted if self.reports_loss else 0.0

    def _settle(self, values: UpdateValues) -> None:
        self.steps_engine.settle(OwedStepEnd(self.optimizer, values))

    def close(self) -> None:
        """Make the updates that are owed, unless an error has left a step in its midst. Else as of `EngineState`."""
        if not self.steps_engine.is_broken:
            self.state.wait_parameters()
        super().close()

    def _taken(self, batches: GivenBatches, what: str) -> list[OwnBatch]:
        """This rank's micro-batches on the device, for which the ranks have compared what each was given: in the first
        step, or evaluation (`what`), also their contents.
        """
        taken = micro_batches(batches, self.grid.device)
        require_same_batches(taken, self.grid, self.lr, contents=what not in self._compared)
        self._compared.add(what)
        when, first = self.words_of_step(), self.data_rank * len(taken)
        return [replace(batch, draws=f"{when} {number}") for number, batch in enumerate(taken, first)]

    def words_of_step(self) -> str:
        """Words for the step under way, beside which micro-batches have numbers: what units draw depends on them."""
        return f"{self.run.data.seed} {self.steps}"

    def _made_for(self, batch: OwnBatch) -> PipelineEngine:
        """The engine for micro-batches of the shapes of this one."""
        messages: tuple[MessageSpec, ...] = ()
        if len(self._placed.chunks) > 1:
            with self._placed.cuts.whole():
                messages = boundaries(self._called, self._placed.chunks, batch.tensors, self.dtype, self.whole_shapes)
        parts = self.stages, self.grid, self._lists, messages, self._channels, self.state.actions
        return PipelineEngine(*parts, self._activations)

    def _forget_gradients(self) -> None:
        self.state.reducer.discard()
        self.state.mover.discard()


def engine(
    model: Model,
    optimizer: str | MakeOptimizer = "adamw",
    lr: float | None = None,
    run: Mapping[str, Any] | None = None,
    *,
    timed: BatchTensors | None = None,
    example: GivenBatches | None = None,
    groups: GivenGroups | None = None,
) -> Engine:
    """A model in training. All ranks call it: those that torchrun started, or of torch's default process group.

    model      of `megazero.Model`. Its modules become the engine's: their parameters are views of its buckets. The
               values of units that are on other ranks are freed
    optimizer  adamw, adam or sgd; or what makes an optimizer of torch of a list of parameters, such as
               `functools.partial(torch.optim.Adagrad, lr=0.01)`, whose update of an element depends on that alone
    lr         the learning rate until a step says another. None: 1e-3, or that of the optimizer of torch
    run        fields of a run, as `megazero.pretrain` takes them: {"pp": 2, "zero_stage": 3}. If `precision` is not
               set, it is that of the model's parameters
    timed      a micro-batch, with which rank 0 measures how long each unit takes: units are divided among stages by
               these times. None: by numbers of parameters, or as `partition` says
    example    micro-batches of a step, as `step` takes them: rank 0 measures with the first what each unit keeps of it,
               so that the memory of a step is known (`planned_memory`), and held to budgets of the run. None: that of
               the model state alone is known, and there are no budgets
    groups     from patterns of parameters' names to options of their updates: `lr_factor`, by which the learning rate
               of each step is multiplied, `weight_decay`, `betas`, `eps`, `momentum`, or those of the optimizer of
               torch. The first pattern that a name fits counts. A parameter that none fits has the optimizer's

    A collective of all ranks. Raises ConfigError with everything that is wrong, and TypeError for another model.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"model is {type(model).__name__}: a megazero.Model is needed, of a list of modules in forward order; "
            "megazero.from_sequential and megazero.from_transformers make one"
        )
    time_units = None if timed is None else partial(unit_seconds, model, timed)
    measure = None if example is None else _measured_with(model, example)
    opening = opening_of(model, optimizer, lr, run, time_units=time_units, measure=measure, named=groups)
    return made_with(opening, lambda opening: Engine(model, opening))


def _measured_with(model: Model, example: GivenBatches) -> MeasuredStep:
    """What measures a model with micro-batches of a step."""
    number = len(micro_batches(example, META))
    first = example if isinstance(example, Mapping) else example[0]
    return MeasuredStep(model, lambda run: first, number)
