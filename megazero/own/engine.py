"""Training of a user's modules: `engine` takes a model, and a step takes micro-batches.

The parts of a step are those of `megazero.pretrain`: the program of instructions, the model state in buckets, the
schedules. They know nothing of GPT.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import attempt_on_all_ranks, raise_on_all_ranks
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.convert.files.safetensors_file import TensorHeader, write_safetensors
from megazero.launch import world_of
from megazero.mpu import collectives
from megazero.mpu.bundle import MessageSpec
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.mpu.parameter import spec_of
from megazero.optim.loss_scale import LossScaler
from megazero.own.model import Model, OwnUnit
from megazero.own.rank_units import PlacedModel, place_model, structure_digest, values_digest
from megazero.own.refusals import (
    GivenBatches,
    TrainedParameters,
    learning_rate,
    micro_batches,
    require_alike,
    require_same_batches,
)
from megazero.own.saved import OwnCheckpoints, kept_in, require_names, require_same_optimizer
from megazero.own.settings import run_of
from megazero.own.stage import OwnBatch, boundaries, buffer_dtype, shapes_of
from megazero.own.torch_rule import MakeOptimizer, TorchRule
from megazero.own.values import InitialValues
from megazero.pipeline.build import step_lists
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.stage_specs import chunks_of
from megazero.telemetry.watchdog import StopSignals
from megazero.train.embedded import process_groups, rendezvous, result_on_all_ranks
from megazero.train.swap_files import StateFiles, state_files
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import OwedStepEnd, ShardedOptimizer, TrainingStepEnd
from megazero.zero.state import ModelState

FILLED = ("weight",)
LR = 1e-3
"""The learning rate of one of our optimizers, if nobody says another."""


class StepResult(NamedTuple):
    """Numbers of a step, the same on all ranks: 0-dim tensors on the device, for which nobody has waited.

    loss       the sum of the losses of all micro-batches of all ranks, over their number
    grad_norm  before clipping
    skipped    whether a gradient or the loss was not finite, so that nothing was updated
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


class Engine:
    """A model in training on this rank, with its part of the units and of the model state.

    Made by `megazero.engine`. It is a context, which ends its process groups; `close` does, too.

    steps                  number of steps that were made, those before a load included
    rank                   this rank's number among all
    data_rank, data_ranks  which micro-batches are this rank's: those of one of so many parts of a batch. All stages
                           of a part take the same
    """

    def __init__(
        self,
        model: Model,
        run: Run,
        lr: float,
        rule: TorchRule | None,
        grid: ProcessGrid,
        files: StateFiles | None,
        contexts: ExitStack,
    ) -> None:
        """contexts: of the process groups and files, which the engine takes over and ends."""
        self.run, self.lr, self.grid = run, lr, grid
        self.dtype = compute_dtype(run.optimizer.precision)
        self.rank, self.data_rank, self.data_ranks = grid.rank, grid.dp.index, grid.dp.size
        digests = {
            "have other models: other units, names, shapes or dtypes": structure_digest(model),
            "begin with other values: seed torch alike on all of them": values_digest(model),
        }
        require_alike(digests, grid)
        self._placed: PlacedModel = attempt_on_all_ranks(grid.world, grid.device, lambda: place_model(model, run, grid))
        placed = self._placed
        self.stages = placed.stages
        opens = None if files is None else files.open
        self.state = ModelState(self.stages, grid, run.optimizer, run.parallel, None, run.offload, opens)
        self.optimizer = ShardedOptimizer(self.state, run.optimizer, grid, rule)
        self._kept = run.optimizer.moments if rule is None else (*rule.columns,)
        """What a checkpoint has to have of each weight, by the optimizer's own names."""
        self.scaler = LossScaler(run.optimizer, grid.device)
        self._fill(placed.values)
        self.steps = 0
        self._checkpoints = OwnCheckpoints(run, grid, self.optimizer, placed.inventory, placed.chunks)
        self._lists = step_lists(run, grid.at.pp, self.state.shape)
        self._channels = Channels(grid, and_back=chunks_of(run).and_back)
        self._engines: dict[Any, PipelineEngine] = {}
        """By the shapes of micro-batches."""
        self._trained = TrainedParameters(self._units(), unused=model.unused)
        self._ends = contexts.pop_all()
        # where nobody closes the engine, its files go with the engine, or with the process
        self._leaves = weakref.finalize(self, _leave, self._ends)

    # --- how it is built -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self, values: InitialValues) -> None:
        """Set the weights to these values. A collective of all ranks."""

        def fill() -> None:
            for fragments in self.optimizer.portions(FILLED):
                for fragment in fragments:
                    whole = values.of(fragment.spec.name).reshape(-1)
                    fragment.weight.copy_(whole[fragment.start : fragment.stop])

        attempt_on_all_ranks(self.grid.world, self.grid.device, fill)
        self.optimizer.after_load(FILLED)
        self.state.frozen.fill(lambda spec: values.of(spec.name).to(self.dtype))
        values.forget()

    def _units(self) -> list[OwnUnit]:
        """This rank's, in forward order of its chunks."""
        return [unit for stage in self.stages for unit in stage.units() if isinstance(unit, OwnUnit)]

    # --- how it is used --------------------------------------------------------------------------------------------

    def step(self, batches: GivenBatches, lr: float | None = None) -> StepResult:
        """Make one optimizer step.

        batches  this rank's micro-batches, by name of their tensors, each of the same shapes: as many on every rank.
                 One mapping is one micro-batch
        lr       the learning rate of this step; None: the last one

        A collective of all ranks. Raises ValueError with a unit's name for what the unit returns.
        """
        self._trained.require_as_before()
        self.lr = self.lr if lr is None else learning_rate(lr)
        taken = self._taken(batches)
        engine = self._engine(taken[0])
        for stage in self.stages:
            stage.counted.zero_()
        scale = self.scaler.scale
        self.state.messages.begin_step(scale)
        owed = self.state.owed.take()
        reports = engine.has_loss
        end = TrainingStepEnd(
            optimizer=self.optimizer,
            reduce=self._reduce,
            lr=self.lr,
            positions=1,
            scale=scale,
            clip_grad=self.run.optimizer.clip_grad,
            tokens=self.stages[-1].counted if reports else 0.0,
            reports=reports,
            stops=lambda: False,
            values=owed,
        )
        engine.train(taken, scale, end, owed=owed is not None)
        self._trained.require_reached()
        if self.run.parallel.late_update and end.values is not None:
            self.state.owed.leave(end.values, self._settle)
        self.optimizer.end_step(end.bad)
        self.scaler.update(end.bad)
        self.steps += 1
        return StepResult(end.loss_sum / end.all_tokens, end.grad_norm, end.bad)

    @torch.no_grad()
    def evaluate(self, batches: GivenBatches) -> Tensor:
        """The mean loss of micro-batches, as of `step`, with the modules in evaluation mode. A collective of all
        ranks.
        """
        taken = self._taken(batches)
        engine = self._engine(taken[0])
        for stage in self.stages:
            stage.counted.zero_()
        loss = engine.evaluate(taken)
        reports = engine.has_loss
        total, number = self._reduce(loss if reports else 0.0, self.stages[-1].counted if reports else 0.0)
        return total / number

    def _settle(self, values: UpdateValues) -> None:
        next(iter(self._engines.values())).settle(OwedStepEnd(self.optimizer, values))

    def _taken(self, batches: GivenBatches) -> list[OwnBatch]:
        """This rank's micro-batches on the device, for which the ranks have compared what each was given."""
        taken = micro_batches(batches, self.grid.device)
        require_same_batches(taken, self.grid)
        when, first = f"{self.run.data.seed} {self.steps}", self.data_rank * len(taken)
        return [replace(batch, draws=f"{when} {number}") for number, batch in enumerate(taken, first)]

    def _engine(self, batch: OwnBatch) -> PipelineEngine:
        """The engine for micro-batches of these shapes."""
        shapes = shapes_of(batch.tensors)
        if shapes not in self._engines:
            messages: tuple[MessageSpec, ...] = ()
            if len(self._placed.chunks) > 1:
                messages = boundaries(self._placed.units, self._placed.chunks, batch.tensors, self.dtype)
            self._engines[shapes] = PipelineEngine(
                self.stages, self.grid, self._lists, messages, self._channels, self.state.actions
            )
        return self._engines[shapes]

    def _reduce(self, *values: Tensor | float) -> list[Tensor]:
        """The sum of each value over all ranks; one all-reduce of the world."""
        return collectives.sums(values, self.grid.world, self.grid.device)

    @contextmanager
    def parameters_whole(self) -> Iterator[dict[str, Tensor]]:
        """A context with the parameters of this rank's units by name, whole and up to date. A collective of all
        ranks.
        """
        with self.state.reading():
            mine = (parameter for unit in self._units() for parameter in unit.parameters())
            yield {spec_of(parameter).name: parameter.detach() for parameter in mine}

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model in host memory, on every rank: what `load_state_dict` of an
        `nn.ModuleList` or `nn.ModuleDict` of the units takes. Of a parameter that several units have, each has a copy
        under its own name. A collective of all ranks.
        """
        return dict(self._collected(lambda tensor: True))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what `state_dict` has to a new file in the format of safetensors, with a unit at a time in memory. In
        plain torch `safetensors.torch.load_file` opens it. A collective of all ranks, of which rank 0 writes. Raises
        OSError on all ranks.
        """
        named = [(name, tensor) for unit in self._placed.units for name, tensor in unit.tensors()]
        slots = [TensorHeader(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in named]
        collected = self._collected(lambda tensor: True)

        def write() -> None:
            write_safetensors(Path(path), slots, (tensor for _, tensor in collected))

        failure: Exception | None = None
        try:
            if self.rank == 0:
                write()
        except Exception as error:
            failure = error
        for _ in collected:  # on other ranks, and what is left where writing has failed
            pass
        raise_on_all_ranks(self.grid.world, self.grid.device, failure)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """That of a parameter or buffer of the model on the rank that has it."""
        return self.dtype if isinstance(tensor, nn.Parameter) else buffer_dtype(tensor, self.dtype)

    def _collected(self, wanted: Callable[[Tensor], bool]) -> Iterator[tuple[str, Tensor]]:
        """Those of `state_dict` that are wanted, one after the other. Of another stage's a rank knows the shapes alone.
        A collective of all ranks, which go through all of them.
        """
        chunks, device = chunks_of(self.run), self.grid.device
        self.state.wait_parameters()  # makes updates that are owed, for which all ranks have to call it
        for model_chunk, numbers in enumerate(self._placed.chunks):
            stage = chunks.holder(model_chunk)[0]
            for unit in (self._placed.units[number] for number in numbers):
                is_here = stage == self.grid.pp.index
                with self.state.reading(unit) if is_here else nullcontext():
                    for name, tensor in unit.tensors():
                        if wanted(tensor):
                            value = torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device=device)
                            if is_here:
                                value.copy_(tensor.detach())
                            collectives.broadcast(value, self.grid.pp, stage).wait()
                            yield name, value.cpu()

    def save(self, folder: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint into a folder, and return its path. The three newest are kept.

        about: what the program wants back from `load`, as JSON holds it: where its data are, for instance.

        A collective of all ranks, of which one file system or several have the folder. Raises as a save of a run does.
        """
        try:
            json.dumps(dict(about or {}))
        except (TypeError, ValueError) as error:
            raise TypeError(f"about holds what JSON does not hold: {error}") from error
        progress = {
            "steps": self.steps,
            "lr": self.lr,
            "optimizer_steps": float(self.optimizer.step_count.item()),
            "loss_scale": self.scaler.state_dict(),
            "optimizer_keeps": [*self._kept],
            "about": dict(about or {}),
        }
        return self._checkpoints.save(os.fspath(folder), self.steps, progress, dict(self._collected(_is_untrained)))

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Go on from the newest complete checkpoint in a folder, of any layout and precision, or from the one that the
        folder is; return what was handed to `save`. None, and nothing changes, if there is none.

        A collective of all ranks. Raises Damaged, or ValueError with the names that the model or the optimizer does not
        share.
        """
        found = self._checkpoints.find(os.fspath(folder))
        if found is None:
            return None
        require_same_optimizer(kept_in(found), self._kept)
        untrained = self._checkpoints.load(found)
        self._put_untrained(untrained)
        progress = found.progress
        self.steps, self.lr = int(progress["steps"]), float(progress["lr"])
        self.optimizer.step_count.fill_(progress["optimizer_steps"])
        self.scaler.load_state_dict(progress["loss_scale"])
        about: dict[str, Any] = progress["about"]
        return about

    @torch.no_grad()
    def _put_untrained(self, read: Mapping[str, Tensor]) -> None:
        """Set frozen parameters and buffers to what a checkpoint has."""
        every = (named for unit in self._placed.units for named in unit.tensors())
        require_names(read, {name: tensor.shape for name, tensor in every if _is_untrained(tensor)})
        self.state.frozen.fill(lambda spec: read[spec.name].to(self.dtype))
        for unit in self._units():
            for name, tensor in unit.tensors():
                if not isinstance(tensor, nn.Parameter):
                    tensor.copy_(read[name])

    def close(self) -> None:
        """End the process groups and the lanes of what has left the device. Called by all ranks."""
        self.state.tiers.close(remove=True)
        self._leaves.detach()
        self._ends.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            self.close()
        else:
            self._leaves.detach()
            self._ends.__exit__(*raised)


def _leave(contexts: ExitStack) -> None:
    """Remove the files of an engine that nobody closes. Waits for no other rank, which may be gone."""
    with suppress(GeneratorExit):
        contexts.__exit__(GeneratorExit, GeneratorExit(), None)


def _is_untrained(tensor: Tensor) -> bool:
    """Whether a tensor of a module is a buffer or a frozen parameter."""
    return not tensor.requires_grad


def engine(
    model: Model,
    optimizer: str | MakeOptimizer = "adamw",
    lr: float | None = None,
    run: Mapping[str, Any] | None = None,
) -> Engine:
    """A model in training. All ranks call it: those that torchrun started, or of torch's default process group.

    model      of `megazero.Model`. Its modules become the engine's: their parameters are views of its buckets. The
               values of units that are on other ranks are freed
    optimizer  adamw, adam or sgd; or what makes an optimizer of torch of a list of parameters, such as
               `functools.partial(torch.optim.Adagrad, lr=0.01)`, whose update of an element depends on that alone
    lr         the learning rate until a step says another. None: 1e-3, or that of the optimizer of torch
    run        fields of a run, as `megazero.pretrain` takes them: {"pp": 2, "zero_stage": 3}. If `precision` is not
               set, it is that of the model's parameters

    A collective of all ranks. Raises ConfigError with everything that is wrong.
    """
    meeting = rendezvous()
    environment = meeting.environment

    def resolved() -> tuple[float, TorchRule | None, Run]:
        name, rule = (optimizer, None) if isinstance(optimizer, str) else _rule_of(optimizer)
        rate = learning_rate(lr if lr is not None else LR if rule is None else rule.lr)
        kept = None if rule is None else rule.kept
        return rate, rule, run_of(run or {}, name, model, environment.world_size, kept)

    rate, rule, made_run = result_on_all_ranks(resolved, meeting)
    with ExitStack() as opened:
        world = world_of(made_run, environment)
        grid = opened.enter_context(process_groups(world, meeting, made_run.parallel))
        files = opened.enter_context(state_files(made_run, grid, None, StopSignals()))
        return Engine(model, made_run, rate, rule, grid, files, opened)


def _rule_of(optimizer: MakeOptimizer) -> tuple[str, TorchRule]:
    rule = TorchRule(optimizer)
    return rule.name, rule
