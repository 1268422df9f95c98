"""What each instruction of a step makes, against what one process makes of the same samples.

One process records: the weights that each layer reads, what goes into each layer, its gradient, and what each
micro-batch adds to the gradient of each parameter. On ranks the same values are compared as they come, so that the
first one that differs is found where it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.model.batch import MicroBatch
from megazero.model.stage import Stage
from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.parameter import Parameter, ParameterSpec, StateGroup, spec_of
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.schedule_run import ScheduleRun
from megazero.pipeline.stage_specs import unit_names
from megazero.program.instruction import UPDATE, UPDATE_HOST, Instruction, Kind, Op
from megazero.train.job import Job
from megazero.verify.compare import FLOOR, TOLERANCE, FirstDifference
from megazero.verify.session import SPOILED

INPUT, INPUT_GRADIENT, READ, PART = "input", "gradient of the input", "weights read", "gradient of one micro-batch"
"""The kinds of values. Of a layer: what goes into it, the gradient of that, and its weights. Of a parameter: what a
micro-batch adds to its gradient."""


_UPDATES: tuple[frozenset[Kind], ...] = (frozenset((UPDATE, UPDATE_HOST)),)
_MAKERS: dict[str, tuple[frozenset[Kind], ...]] = {
    "gradient": tuple(map(frozenset, ((Op.REDUCE,), (Op.REDUCE_ACROSS, Op.REDUCE_PARTIAL)))),
    "parameter": (frozenset((Op.GATHER,)), *_UPDATES),
}
"""By column the kinds of instructions that make it, the likelier ones first."""


class Found(Exception):
    """The first difference has been found. `difference` is it."""

    def __init__(self, difference: FirstDifference) -> None:
        super().__init__(difference.what)
        self.difference = difference


@dataclass
class Recorded:
    """What one process has made: (kind, step, name, samples) -> the value, and the largest one of each kind and step.

    Inputs and their gradients are kept sample by sample, [s, h].
    """

    values: dict[Hashable, Tensor] = field(default_factory=dict)
    largest: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, kind: str, step: int, name: str, samples: Hashable, value: Tensor) -> None:
        """Add to what is there of this value; of one micro-batch a parameter may get several parts."""
        key = kind, step, name, samples
        whole = value.detach().clone()
        self.values[key] = self.values[key] + whole if kind == PART and key in self.values else whole
        most = float(whole.abs().max()) if whole.numel() else 0.0
        self.largest[kind, step] = max(self.largest.get((kind, step), 0.0), most)

    def error(self, kind: str, step: int, true: Tensor, mine: Tensor) -> float:
        """The relative difference, as `compare` has it."""
        if not mine.numel():
            return 0.0
        scale = max(float(true.abs().max()), FLOOR * self.largest.get((kind, step), 0.0), 1e-300)
        apart = float((mine - true).abs().max())
        return apart / scale if apart == apart else math.inf


@dataclass
class _Parts:
    """What ranks add to a parameter's gradient for one micro-batch: the sum so far, over tp and over the stages of a
    tied embedding where each has a part of it."""

    total: Tensor
    missing: int


class Probe:
    """A probe of all ranks of a leg: call it with each job (`session.run_leg`).

    recorded  what one process has made; None: this is one process, and records
    """

    def __init__(self, leg: str, true: Recorded | None = None) -> None:
        self.leg, self.true = leg, true
        self.recorded = Recorded()
        self.ranks: dict[int, _RankProbe] = {}
        self._sums: dict[Hashable, _Parts] = {}

    def __call__(self, job: Job, rank: int) -> None:
        """Have the jobs' engine and layers tell what they make."""
        self.ranks[rank] = _RankProbe(self, job, rank)

    def instruction_of(self, difference: FirstDifference) -> str:
        """The instruction of the rank's list that makes a value which differs after a step; "" if the leg has not begun
        there.
        """
        known = self.ranks.get(difference.rank)
        return (
            known.maker_of(difference) if known is not None and not difference.instruction else difference.instruction
        )

    def under_way(self, rank: int) -> str:
        """The instruction that a rank executes, or was the last to execute; "" before the first one."""
        known = self.ranks.get(rank)
        return "" if known is None or known.now is None else str(known.now)

    def partial_sum(self, key: Hashable, members: int, value: Tensor) -> Tensor | None:
        """Add a part; the sum once all members have come."""
        parts = self._sums.setdefault(key, _Parts(torch.zeros_like(value), members))
        parts.total += value
        parts.missing -= 1
        return self._sums.pop(key).total if parts.missing == 0 else None


class _RankProbe:
    def __init__(self, probe: Probe, job: Job, rank: int) -> None:
        self.probe, self.job, self.rank = probe, job, rank
        self.now: Instruction | None = None
        self.samples: tuple[int, ...] = ()
        self.step = 0
        assert isinstance(job.trainer.engine, PipelineEngine), "a small run has no graphs"
        self.engine = job.trainer.engine
        self.engine.parts = replace(self.engine.parts, watch=self._watch)
        for stage in job.stages:
            self._hook(stage)

    def _watch(self, run: ScheduleRun, instruction: Instruction) -> None:
        """Called before each instruction of every pass; only training's own steps are looked at."""
        self.step = self.job.trainer.position.iteration + 1
        if type(run) is not ScheduleRun or run.end is None or self.step == SPOILED:
            self.now = None
            return
        self.now = instruction
        if instruction.micro_batch >= 0:
            batch = run.micro_batches[instruction.micro_batch]
            assert isinstance(batch, MicroBatch)
            samples = batch.samples
            self.samples = () if samples is None else tuple(samples.tolist())

    def maker_of(self, difference: FirstDifference) -> str:
        """See `Probe.instruction_of`: the last one of the kinds that make a column which has the parameter's bucket, or
        has all buckets.
        """
        if not difference.column:
            return "evaluation" if difference.parameter == "the validation loss" else Op.NORM.value
        run, lists = self.job.run, self.engine.lists
        count = run.schedule.global_batch_size // (run.schedule.micro_batch_size * self.job.grid.axes.dp)
        buckets = {
            number
            for number, bucket in enumerate(self.job.state.model.buckets)
            if any(spec_of(parameter).name == difference.parameter for parameter in bucket.parameters)
        }
        late = run.parallel.late_update and difference.step > 1
        instructions = lists.training(count, owed=late)
        for kinds in _MAKERS.get(difference.column, _UPDATES):
            made = [i for i in instructions if i.op in kinds and (not i.buckets or buckets & {*i.buckets})]
            if made:
                return str(made[-1])
        return Op.NORM.value

    def _hook(self, stage: Stage) -> None:
        for name, unit in zip(unit_names(stage.spec), stage.units(), strict=True):
            unit.register_forward_pre_hook(partial(self._before, name))
        for parameter in stage.parameters():
            assert isinstance(parameter, Parameter)
            if parameter.requires_grad and not isinstance(parameter.gradient_target, _Tap):
                parameter.gradient_target = _Tap(parameter.gradient_target, partial(self._part, parameter.spec))
                parameter.register_hook(partial(self._part, parameter.spec))

    def _before(self, name: str, unit: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.now is None:
            return
        for parameter in unit.parameters():
            spec = spec_of(parameter)
            self._look(READ, spec.name, (), parameter.detach().reshape(-1)[: spec.stored_numel], spec)
        hidden = inputs[0] if isinstance(inputs[0], Tensor) else None
        if hidden is None:
            return
        self._rows(INPUT, name, hidden.detach())
        if hidden.requires_grad:
            hidden.register_hook(partial(self._rows, INPUT_GRADIENT, name))

    def _rows(self, kind: str, name: str, hidden: Tensor | None) -> None:
        """hidden: [s(/t), b, h] of the micro-batch under way."""
        if hidden is None:  # of the gradient: nothing depends on it
            return
        tp = self.job.grid.tp
        for column, sample in enumerate(self.samples if self.now is not None else ()):
            mine = hidden[:, column]
            if self.probe.true is None:
                self.probe.recorded.add(kind, self.step, name, sample, mine)
                continue
            true = self.probe.true.values[kind, self.step, name, sample]
            if len(mine) < len(true):  # sequence parallelism: this rank's rows
                true = true[len(mine) * tp.index :][: len(mine)]
            self._judge(f"the {kind} of {name}", "", kind, true, mine)

    def _part(self, spec: ParameterSpec, value: Tensor | None) -> None:
        if self.now is not None and value is not None:  # None: the layer has used the gradient target itself
            self._look(PART, spec.name, self.samples, value.detach().reshape(-1)[: spec.stored_numel], spec)

    def _look(
        self, kind: str, name: str, samples: tuple[int, ...], value: Tensor, spec: ParameterSpec, of: str = ""
    ) -> None:
        probe = self.probe
        if probe.true is None:
            if kind == PART or (kind, self.step, name, samples) not in probe.recorded.values:
                probe.recorded.add(kind, self.step, name, samples, value.reshape(spec.shape))
            return
        true = probe.true.values.get((kind, self.step, name, samples))
        if true is None:
            raise Found(self._difference(name, "gradient", math.inf))
        if kind == PART:
            at, size = self.job.grid.at, self.job.grid.axes
            ends = 2 if spec.state_group is StateGroup.TIED and size.pp > 1 else self._uses(name)
            members = ends * (size.tp if spec.tp_partial else 1)
            key = self.step, name, samples, -1 if spec.tp_partial else at.tp
            total = probe.partial_sum(key, members, value)
            if total is None:
                return
            value = total
        region = tuple(slice(*ends) for ends in spec.box)
        column = "gradient" if kind == PART else "parameter"
        self._judge(name, column, kind, true[region].reshape(-1), value)

    def _uses(self, name: str) -> int:
        """How often a backward of this rank adds to a parameter: twice for a tied embedding with both its layers."""
        tied = not self.job.run.model.untie_embeddings_and_output_weights
        return 2 if tied and name == _tied_name(self.job) else 1

    def _judge(self, name: str, column: str, kind: str, true: Tensor, mine: Tensor) -> None:
        assert self.probe.true is not None
        error = self.probe.true.error(kind, self.step, true, mine)
        if error > TOLERANCE:
            raise Found(self._difference(name, column, error))

    def _difference(self, name: str, column: str, error: float) -> FirstDifference:
        return FirstDifference(name, column, self.rank, str(self.now), self.step, self.probe.leg, error)


def _tied_name(job: Job) -> str:
    """The name of the weight that embedding and head share, where they are on one rank; "" elsewhere."""
    embeddings = [stage.embedding for stage in job.stages if stage.embedding is not None]
    has_head = any(stage.head is not None for stage in job.stages)
    return spec_of(embeddings[0].word.weight).name if embeddings and has_head else ""


class _Tap:
    """A gradient target that tells what is added to it."""

    def __init__(self, target: GradientTarget, tell: Callable[[Tensor], None]) -> None:
        self.target, self.tell = target, tell

    def add(self, write: Write) -> None:
        """See `GradientTarget.add`."""

        def write_and_tell(into: Tensor, add: bool) -> None:
            before = into.clone() if add else torch.zeros_like(into)
            write(into, add)
            self.tell(into - before)

        self.target.add(write_and_tell)
