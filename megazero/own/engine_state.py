"""What an engine of a user's model has, however its steps compute: units, model state, optimizer, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import attempt_on_all_ranks, raise_on_all_ranks
from megazero.checkpoint.manager import FoundCheckpoint, find_on_all_ranks
from megazero.config.derive import brings_parameters, whole_steps
from megazero.config.schema import Run
from megazero.convert.files.safetensors_file import TensorHeader, write_safetensors
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.mpu.parameter import Parameter, own_box, spec_of
from megazero.optim.loss_scale import LossScaler
from megazero.own.activation_files import activation_files
from megazero.own.opening import Opening
from megazero.own.rank_units import PlacedModel, place_model, require_free, structure_digest, values_digest
from megazero.own.saved import (
    MODEL,
    OwnCheckpoints,
    kept_in,
    require_names,
    require_same_optimizer,
    saved_model,
)
from megazero.own.settings import alike, dtype_of_all, settings_digest
from megazero.own.tensor_parallel.boxes import whole_of
from megazero.own.units.model import Unit, Units
from megazero.own.units.parameter_shape import ParameterShape
from megazero.own.units.refusals import TrainedParameters, require_alike, require_json
from megazero.own.units.taken_tensors import taken_dtype
from megazero.own.units.values import InitialValues
from megazero.pipeline.build import host_activations, step_lists
from megazero.pipeline.stage_specs import chunks_of
from megazero.system import device as devices
from megazero.train.resume import fill_from_swap
from megazero.train.state import TrainState
from megazero.train.whole_steps import StepOwner, SwapStart
from megazero.zero.actions import UpdateValues
from megazero.zero.optimizer import ShardedOptimizer, TrainingStepEnd
from megazero.zero.state import ModelState

FILLED = ("weight",)


class StepResult(NamedTuple):
    """Numbers of a step, the same on all ranks: 0-dim tensors on the device, for which nobody has waited.

    loss       the sum of the losses of all micro-batches of all ranks, over their number
    grad_norm  before clipping
    skipped    whether a gradient or the loss was not finite, so that nothing was updated
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class ModelContents:
    """By what a step in swap files knows a model on this rank.

    inventory  the parameters of each unit
    chunks     the units of each model chunk
    rule       an optimizer of torch in words; "": it is one of ours
    untrained  a digest of frozen parameters and buffers with which the program begins
    """

    run: Run
    grid: ProcessGrid
    inventory: Sequence[Sequence[ParameterShape]]
    chunks: Sequence[range]
    rule: str
    untrained: int


class StepLoop(Protocol):
    """megazero's own loop, which takes the steps of an engine."""

    def owner(self, contents: ModelContents) -> StepOwner:
        """What a step in swap files has to fit."""

    @property
    def keeps_files(self) -> bool:
        """Whether swap files stay when the engine is closed."""


class EngineState:
    """A model in training on this rank: its part of the units, their state, and what a checkpoint has of them. It is a
    context, which ends its process groups; `close` does, too. How a step computes is a matter of subclasses.

    loop: megazero's own, which takes the steps; None: the program takes them.

    steps                  number of steps that were made, those before a load included
    rank                   this rank's number among all
    data_rank, data_ranks  which micro-batches are this rank's: those of one of so many parts of a batch. All stages
                           of a part take the same
    """

    def __init__(self, model: Units, opening: Opening, loop: StepLoop | None = None) -> None:
        self._opening, self._loop = opening, loop
        run, grid = opening.run, opening.grid
        self.run, self.lr, self.grid = run, opening.lr, grid
        self.dtype = dtype_of_all(run)
        """That of all parameters; None: each has its own."""
        self.rank, self.data_rank, self.data_ranks = grid.rank, grid.dp.index, grid.dp.size
        attempt_on_all_ranks(grid.world, grid.device, lambda: require_free(model))  # before its values are compared
        digests = {
            "have other models: other units, names, shapes or dtypes": structure_digest(model),
            "begin with other values: seed torch alike on all of them": values_digest(model),
        }
        rule = "" if opening.rule is None else opening.rule.words
        grouped = "" if opening.groups is None else opening.groups.words
        digests["have other settings, or options of the optimizer"] = settings_digest(run, rule + grouped, opening.lr)
        require_alike(digests, grid)
        becomes_whole = loop is not None and whole_steps(run.offload)
        untrained = values_digest(model, trained=False) if becomes_whole else 0
        self._placed: PlacedModel = attempt_on_all_ranks(grid.world, grid.device, lambda: place_model(model, run, grid))
        placed = self._placed
        self._shapes = {each.name: each for unit in placed.inventory for each in unit}
        """All parameters of the model by name."""
        self.stages = placed.stages
        files = opening.files
        if files is not None and loop is not None and becomes_whole:
            files.owner = loop.owner(ModelContents(run, grid, placed.inventory, placed.chunks, rule, untrained))
        opens = None if files is None else files.open
        self.state = ModelState(self.stages, grid, run.optimizer, run.parallel, None, run.offload, opens)
        self.optimizer = ShardedOptimizer(self.state, run.optimizer, grid, opening.rule, opening.group_of)
        self._kept = run.optimizer.moments if opening.rule is None else (*opening.rule.columns,)
        """What a checkpoint has to have of each weight, by the optimizer's own names."""
        self.scaler = LossScaler(run.optimizer, grid.device)
        self.swapped = None if files is None else files.start
        """With nvme_checkpoint where swap files lead."""
        self.steps = 0
        self._fill(placed.values)
        self.checkpoints = OwnCheckpoints(run, grid, self.optimizer, placed.inventory, placed.chunks)
        self._lists = step_lists(run, grid.at.pp, alike(self.state.shape, run, begins=grid.at.pp == 0))
        self._activations = host_activations(run, grid.device, activation_files(run, grid, opening))
        self._channels = Channels(grid, and_back=chunks_of(run).and_back)
        # where a rank has the only numbers of a weight, and updates them in place, a program may change them
        alone = run.parallel.zero_stage == 0 and not run.offload.offload_optimizer and not run.parallel.late_update
        masters = not alone or self.state.has_master or brings_parameters(run.parallel, run.offload)
        self._trained = TrainedParameters(self._units(), unused=model.unused, masters=masters)
        self.planned_memory = opening.memory
        """What is known of the memory of a step: text, or fields of `PlannedMemory`."""
        if run.offload.device_memory_budget is not None:
            devices.limit_memory(grid.device, run.offload.device_memory_budget)
        opening.leave_first()

    # --- how it is built -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self, values: InitialValues) -> None:
        """Set the weights to these values. A collective of all ranks."""

        def fill() -> None:
            for fragments in self.optimizer.portions(FILLED):
                for fragment in fragments:
                    spec = fragment.spec
                    part = own_box(values.of(spec.name).reshape(spec.shape), spec).reshape(-1)
                    fragment.weight.copy_(part[fragment.start : fragment.stop])

        if self.swapped is not None and self.swapped.step is not None:
            self._go_on(self.swapped)
        else:
            attempt_on_all_ranks(self.grid.world, self.grid.device, fill)
            self.optimizer.after_load(FILLED)
        self.state.frozen.fill(lambda spec: values.of(spec.name).reshape(spec.shape))
        values.forget()

    @property
    def inventory(self) -> Sequence[Sequence[ParameterShape]]:
        """The parameters of each unit of the model, wherever they are."""
        return self._placed.inventory

    @property
    def whole_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the model's parameters by name, of which a tp rank may have a part."""
        return {name: each.shape for name, each in self._shapes.items()}

    def _go_on(self, swapped: SwapStart) -> None:
        """Go on from a step in swap files. A collective of all ranks."""
        fill_from_swap(self.run, self.train_state, swapped, self.grid)
        self.steps = swapped.position.iteration

    @property
    def train_state(self) -> TrainState:
        """What a step changes."""
        return TrainState(self.state, self.optimizer, self.scaler, None)

    def _units(self) -> list[Unit]:
        """This rank's, in forward order of its chunks."""
        return [unit for stage in self.stages for unit in stage.units() if isinstance(unit, Unit)]

    # --- a step ----------------------------------------------------------------------------------------------------

    def _begin_step(self, tokens: Tensor | float, *, reports: bool) -> TrainingStepEnd:
        """What ends a step that begins now. tokens: the number that the losses of this rank are a sum over. reports:
        whether this rank has losses.
        """
        scale = self.scaler.scale
        self.state.messages.begin_step(scale)
        return TrainingStepEnd(
            optimizer=self.optimizer,
            reduce=self._reduce,
            lr=self.lr,
            positions=1,
            scale=scale,
            clip_grad=self.run.optimizer.clip_grad,
            tokens=tokens,
            reports=reports,
            stops=lambda: False,
            values=self.state.owed.take(),
            groups=self.groups_at(self.lr),
        )

    def groups_at(self, lr: float) -> tuple[Mapping[str, Any], ...]:
        """The options of groups of parameters in a step with this learning rate; (): all have the same."""
        return () if self._opening.groups is None else self._opening.groups.at(lr)

    def _end_step(self, end: TrainingStepEnd) -> StepResult:
        """Count a step whose list is over."""
        if self.run.parallel.late_update and end.values is not None:
            self.state.owed.leave(end.values, self._settle)
        self.optimizer.end_step(end.bad)
        self.scaler.update(end.bad)
        self.count_step(self.lr)
        return StepResult(end.loss_sum / end.all_tokens, end.grad_norm, end.bad)

    def require_as_before(self) -> None:
        """Raise ValueError if the program has changed parameters behind the engine's back. Called before each step."""
        self._trained.require_as_before()

    def accept_parameters(self) -> None:
        """Take note that the parameters have been changed, and the optimizer's numbers with them."""
        self._trained.accept()

    def require_own_loop(self, what: str) -> None:
        """Raise RuntimeError where megazero's own loop takes the steps."""
        if self._loop is not None:
            raise RuntimeError(f"{what} of the engine of a run: the run takes the steps, and says what it loads")

    def count_step(self, lr: float) -> None:
        """Count a step that was made with this learning rate. Raises ValueError behind the first one if a parameter had
        no gradient in it.
        """
        self._trained.require_reached()
        self.steps, self.lr = self.steps + 1, lr

    def _settle(self, values: UpdateValues) -> None:
        """Make the updates that the last step has left."""
        raise NotImplementedError

    def _reduce(self, *values: Tensor | float) -> list[Tensor]:
        """The sum of each value over all ranks; one all-reduce of the world."""
        return collectives.sums(values, self.grid.world, self.grid.device)

    @contextmanager
    def parameters_whole(self) -> Iterator[dict[str, Tensor]]:
        """A context with the parameters of this rank's units by name, whole and up to date: copies of what is cut among
        tp ranks. A collective of all ranks.
        """
        with self.state.reading():
            mine = (parameter for unit in self._units() for parameter in unit.module.parameters())
            whole = {spec_of(parameter).name: self._whole(parameter) for parameter in mine}
            copies = {name: each._version for name, each in whole.items() if self._is_copied(name)}
            yield whole
            if written := [name for name, version in copies.items() if whole[name]._version != version]:
                raise ValueError(
                    f"{written[0]} has been written into, and is a copy: parameters_whole() has those of what is cut "
                    "among tp ranks. Set values in front of the engine, or by its load"
                )

    def _whole(self, tensor: Tensor) -> Tensor:
        """A parameter or buffer of this rank as the model has it. A collective of the tp ranks."""
        if not isinstance(tensor, Parameter) or not self._is_copied(spec_of(tensor).name):
            return tensor.detach()
        split = self._shapes[spec_of(tensor).name].split
        assert split is not None
        return whole_of(tensor, split, self._shape_of(tensor), self.grid.tp)

    def _is_copied(self, name: str) -> bool:
        """Whether the whole of a parameter of this name is a copy."""
        return self.grid.tp.size > 1 and self._shapes[name].split is not None

    def _shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """That of a parameter or buffer in the model, of which a tp rank may have a part."""
        return self._shapes[spec_of(tensor).name].shape if isinstance(tensor, Parameter) else tuple(tensor.shape)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model in host memory, on every rank: what `load_state_dict` of an
        `nn.ModuleList` or `nn.ModuleDict` of the units takes. Of a parameter that several units have, each has a copy
        under its own name. A collective of all ranks.
        """
        return dict(self._collected(lambda tensor: True))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what `state_dict` has to a new file in the format of safetensors, with a unit at a time in memory. In
        plain torch `safetensors.torch.load_file` opens it. A collective of all ranks, of which rank 0 writes. Raises on
        all ranks if it cannot, or a file is there: OSError on rank 0, CheckpointError on others.
        """
        named = [(name, tensor) for unit in self._placed.units for name, tensor in unit.tensors()]
        slots = [TensorHeader(name, self._dtype_of(tensor), self._shape_of(tensor)) for name, tensor in named]
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
        return taken_dtype(tensor, self.dtype)

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
                            value = torch.empty(self._shape_of(tensor), dtype=self._dtype_of(tensor), device=device)
                            if is_here:
                                value.copy_(self._whole(tensor))
                            collectives.broadcast(value, self.grid.pp, stage).wait()
                            yield name, value.cpu()

    def save(self, folder: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint into a folder, and return its path. The three newest are kept.

        about: what the program wants back from `load`, as JSON holds it: where its data are, for instance.

        A collective of all ranks, of which one file system or several have the folder. Raises as a save of a run does.
        """
        require_json("about", dict(about or {}))
        if (of_run := self.run.checkpoint.save) is not None and Path(of_run).resolve() == Path(folder).resolve():
            raise ValueError(f"{os.fspath(folder)} is where the run saves: another folder is needed")
        return self.checkpoints.save(os.fspath(folder), self.steps, *self.to_save(dict(about or {})))

    def to_save(self, about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint has beside the state: `progress`, and on rank 0 what is not trained. A collective of all
        ranks.
        """
        progress = {
            "steps": self.steps,
            "lr": self.lr,
            "optimizer_steps": float(self.optimizer.step_count.item()),
            "loss_scale": self.scaler.state_dict(),
            "optimizer_keeps": [*self._kept],
            "about": dict(about),
            MODEL: saved_model(self.inventory, self._placed.names),
        }
        return progress, dict(self._collected(_is_untrained))

    def load(self, folder: str | os.PathLike[str], *, weights_only: bool = False) -> dict[str, Any] | None:
        """Go on from the newest complete checkpoint in a folder, of any layout and precision, or from the one that the
        folder is; return what was handed to `save`. None, and nothing changes, if there is none.

        weights_only: whether training begins anew, with the weights, frozen parameters and buffers of the checkpoint.
                      An engine that has made steps has what the optimizer keeps of them, and cannot

        A collective of all ranks. Raises Damaged, or ValueError with the names that the model or the optimizer does not
        share.
        """
        self.require_own_loop("load")
        if weights_only and self.steps:
            raise RuntimeError(
                f"weights_only begins anew, and this engine has made {self.steps} steps, of which its optimizer keeps "
                "moments: load into a new engine"
            )
        checkpoint = find_on_all_ranks(Path(folder), self.grid)
        if checkpoint is None:
            return None
        self.load_found(checkpoint, weights_only=weights_only)
        about: dict[str, Any] = checkpoint.progress["about"]
        return about

    def load_found(self, checkpoint: FoundCheckpoint, *, weights_only: bool) -> None:
        """Go on from a checkpoint that all ranks have found. Otherwise as `load`."""
        if not weights_only:
            require_same_optimizer(kept_in(checkpoint), self._kept)
        self.checkpoints.load(checkpoint, weights_only=weights_only)
        self.load_untrained(checkpoint)
        if weights_only:
            return
        progress = checkpoint.progress
        self.steps, self.lr = int(progress["steps"]), float(progress["lr"])
        self.optimizer.step_count.fill_(progress["optimizer_steps"])
        self.scaler.load_state_dict(progress["loss_scale"])

    @torch.no_grad()
    def load_untrained(self, checkpoint: FoundCheckpoint) -> None:
        """Set frozen parameters and buffers to what a checkpoint has. A collective of all ranks."""
        read = self.checkpoints.untrained(checkpoint)
        every = (named for unit in self._placed.units for named in unit.tensors())
        require_names(read, {name: self._shape_of(tensor) for name, tensor in every if _is_untrained(tensor)})
        self.state.frozen.fill(lambda spec: read[spec.name].reshape(spec.shape))
        for unit in self._units():
            for name, tensor in unit.tensors():
                if not isinstance(tensor, nn.Parameter):
                    tensor.copy_(read[name])

    def close(self) -> None:
        """End the process groups and the lanes of what has left the device. Called by all ranks."""
        self.state.tiers.close(remove=self._loop is None or not self._loop.keeps_files)
        if self._activations is not None:
            self._activations.close()
        self._opening.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            self.close()
        else:
            self._opening.__exit__(*raised)


def _is_untrained(tensor: Tensor) -> bool:
    """Whether a tensor of a module is a buffer or a frozen parameter."""
    return not tensor.requires_grad
