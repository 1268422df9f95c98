"""Bytes and work of one unit of a run (embedding, block, head), measured from the unit itself on torch's meta device.

The unit runs forward and backward there by the ways of its own device (`fused_ops.native.stand_in`), without memory and
without computing. `pipeline.storages` counts what it makes, and `pipeline.recorded` what its kernels do. It is a stage
of one unit, built and run as in training, of a tensor-parallel group whose other ranks are not there. A unit runs three
times: what is made once and then kept (tables of angles, FP8 copies of weights, memory for logits on a CPU) is there
from the second time on.

A unit's input, its output's gradient, and parameters with their gradients belong to others and are not counted. Numbers
that autograd keeps in host memory (the scale of an adapter) are not either, nor is memory that matrix libraries take
for themselves: cuBLAS's workspace and oneDNN's scratch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from fused_ops.attention.selection import AttentionSupport, Body
from fused_ops.native.library import choice
from fused_ops.native.stand_in import META, standing_for, witnessed_by
from megazero.config.derive import FULL, NONE
from megazero.config.schema import ParallelConfig, Run, ScheduleConfig
from megazero.model.batch import MicroBatch
from megazero.model.stage import Stage, StageSpec
from megazero.mpu.absent import absent_group
from megazero.mpu.gradient import Write
from megazero.mpu.grid import Group, single_rank_group
from megazero.mpu.parameter import Parameter, ParameterKind, spec_of
from megazero.pipeline.build import fp8_state, layout_of
from megazero.pipeline.recorded import KernelLog, KernelMode, UnitWork
from megazero.pipeline.schedule_run import GraphEntry
from megazero.pipeline.storages import Storages, lone_owners, run_backward
from megazero.system.collector import without_collections

DEVICE = torch.device(META)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit for one micro-batch.

    input     of its input that the unit keeps until backward: all, a tp rank's part, or 0
    kept      all else that it keeps from its forward to its backward
    output    of what it makes
    forward   the most that its forward holds, its output included and its input not
    backward  the most that its backward holds, what it keeps and its input's gradient included, and its output's
              gradient and its input not
    deferred  what it keeps from the input's half of a split backward to the weights' half, its input and its output's
              gradient included
    """

    input: int
    kept: int
    output: int
    forward: int
    backward: int
    deferred: int

    @property
    def stays(self) -> int:
        """Of what it keeps where that leaves the device: another unit has none of it."""
        return 0

    @property
    def saved(self) -> int:
        """Of all that it keeps from its forward to its backward."""
        return self.input + self.kept


@dataclass(frozen=True)
class MeasuredCase:
    """A unit, and how it is computed.

    body       the body that computes attention
    kind       of device: cpu or cuda
    spec       of a stage with this unit only
    recompute  what backward computes again of a block: none, selective or full
    graded     whether the unit's input needs a gradient
    """

    run: Run
    body: Body
    kind: str
    spec: StageSpec
    recompute: str
    graded: bool


@dataclass(frozen=True)
class MeasuredUnit:
    """The bytes and the work of a unit."""

    nbytes: UnitBytes
    work: UnitWork


def measured(case: MeasuredCase) -> UnitBytes:
    """The bytes of a unit. Cases that compute the same are measured once in a process."""
    return _measured_once(case).nbytes


def recorded(case: MeasuredCase) -> UnitWork:
    """The work of a unit, in the same measurement."""
    return _measured_once(case).work


def _measured_once(case: MeasuredCase) -> MeasuredUnit:
    return _measured(replace(case, run=read_by_a_unit(case.run)), choice(), torch.get_num_threads())


def read_by_a_unit(run: Run, samples: int | None = None) -> Run:
    """The run with only those settings that the computation of a unit reads. samples: of a micro-batch; None: as many
    as the run's.
    """
    if run.optimizer.fp8 != "off":
        return run  # where parameters are says which copies in FP8 stay
    parallel = ParallelConfig(
        tp=run.parallel.tp,
        sequence_parallel=run.parallel.sequence_parallel,
        shard_recompute_inputs=run.parallel.shard_recompute_inputs,
    )
    schedule = ScheduleConfig(micro_batch_size=samples or run.schedule.micro_batch_size)
    return Run(model=run.model, parallel=parallel, optimizer=run.optimizer, schedule=schedule, lora=run.lora)


@cache
def _measured(case: MeasuredCase, fused: str, threads: int) -> MeasuredUnit:
    """fused, threads: what else of the process decides how a unit is computed."""
    late, log = list[Any](), KernelLog()
    _first_use(replace(case, run=read_by_a_unit(case.run, 1)), fused)
    # what a pass leaves in cycles is not freed in the next
    with (
        without_collections(),
        standing_for(case.kind),
        torch.enable_grad(),
        KernelMode(lone_owners(), log) as storages,
    ):
        stage = built_unit(case, absent_group(case.run.parallel.tp, log.sent))
        batch, targets = batch_of(case.run), list(taken(stage, late))
        storages.leave_out(stage.parameters())
        storages.leave_out(target.into for target in targets)
        storages.leave_out(tensor for tensor in vars(batch).values() if isinstance(tensor, Tensor))
        deferred = _pass(case, stage, batch, storages, log, late).nbytes.deferred
        for target in targets:
            target.late = None
        with witnessed_by(log):
            unit = _pass(case, stage, batch, storages, log, late)
        return replace(unit, nbytes=replace(unit.nbytes, deferred=deferred))


@cache
def _first_use(case: MeasuredCase, fused: str) -> None:
    """Use the operations of a case, whatever its micro-batch. What the first use of an operation in a process leaves in
    cycles belongs to no pass that is counted: it may also hold what waits for the weights' half.
    """
    late: list[Any] = []
    if case.recompute != NONE:
        first_checkpoint()
    with without_collections(), standing_for(case.kind), torch.enable_grad(), Storages(lone_owners()) as storages:
        stage = built_unit(case, absent_group(case.run.parallel.tp))
        list(taken(stage, late))
        _pass(case, stage, batch_of(case.run), storages, KernelLog(), late)


@cache
def first_checkpoint() -> None:
    """The first checkpoint in a process imports torch's compiler, and leaves its frame and tensors in a cycle."""
    checkpoint(torch.clone, torch.empty(0), use_reentrant=False)


def built_unit(case: MeasuredCase, tp: Group) -> Stage:
    """The stage with the unit. Its parameters are in one storage, matrices first, as in buckets: gate and up are
    adjacent.
    """
    run = case.run
    fp8 = fp8_state(run, tp, single_rank_group(), DEVICE)
    if fp8 is not None:
        fp8.calibrated = True
        fp8.begin()
    table = (case.recompute,) * run.model.num_layers
    layout = layout_of(run, tp, DEVICE, AttentionSupport(measured=case.body), fp8, recompute=table)
    tied = not run.model.untie_embeddings_and_output_weights
    stage = Stage(replace(layout, compile=False), case.spec, tied_across_stages=tied)
    parameters = sorted(stage.parameters(), key=lambda parameter: parameter.dim() == 1)
    flat = torch.empty(sum(parameter.numel() for parameter in parameters), dtype=layout.dtype, device=DEVICE)
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    return stage


def batch_of(run: Run) -> MicroBatch:
    """A micro-batch of the run without numbers."""
    model, samples = run.model, run.schedule.micro_batch_size
    numbers = partial(torch.empty, dtype=torch.int64, device=DEVICE)
    size = samples, model.seq_length
    documents = numbers(size) if model.document_mask else None
    positions = numbers(size) if model.document_mask and model.position_embedding == "learned" else None
    factor = torch.empty((), device=DEVICE)
    return MicroBatch(numbers(size), numbers(size), None, numbers(samples), documents, positions, factor)


class _Target:
    """A gradient target that makes each gradient at once, or keeps it in `late` as a split backward does."""

    def __init__(self, parameter: Tensor, late: list[Any]) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.into = torch.empty(parameter.shape, dtype=wide, device=DEVICE)
        self.is_table = spec_of(parameter).kind is ParameterKind.EMBEDDING  # whose gradients are never deferred
        self.late: list[Any] | None = late

    def add(self, write: Write) -> None:
        if self.late is None or self.is_table:
            write(self.into, True)
        else:
            self.late.append(write)

    def take_from(self, parameter: Tensor) -> None:
        """Take the gradient that autograd has made, if it has made one."""
        if self.late is not None and not self.is_table:
            self.late.append(parameter.grad)
        parameter.grad = None


def taken(stage: Stage, late: list[Any]) -> Iterator[_Target]:
    """Give every trained parameter a target that takes its gradient, and these. late: as of `_Target`."""
    for parameter in stage.parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, Parameter)
            parameter.gradient_target = target = _Target(parameter, late)
            parameter.register_post_accumulate_grad_hook(target.take_from)
            yield target


class _Lent:
    """A tensor that belongs to somebody else, and is not counted. alive: its bytes, as long as somebody has it."""

    def __init__(self, storages: Storages, tensor: Tensor) -> None:
        storages.leave_out([tensor])
        self._storage, self._bytes = weakref.ref(tensor.untyped_storage()), tensor.untyped_storage().nbytes()

    @property
    def alive(self) -> int:
        return 0 if self._storage() is None else self._bytes


def _pass(
    case: MeasuredCase, stage: Stage, batch: MicroBatch, storages: Storages, log: KernelLog, late: list[Any]
) -> MeasuredUnit:
    """The bytes and the work of a forward and a backward, as of `pipeline.schedule_run`.

    log   what is told of kernels
    late  what is for the weights' half of a split backward, which is then cleared
    """
    before, lent, hidden, entry = storages.alive, list[_Lent](), None, GraphEntry()
    if not case.spec.has_embedding:
        hidden = hidden_of(case.run, stage)
        lent.append(_Lent(storages, hidden))
        hidden = entry.enter(hidden) if case.graded else hidden
    storages.most = storages.alive
    log.clear()
    output = stage(hidden, batch, (0, 1))
    del hidden
    forward_work, size = log.work(), output.untyped_storage().nbytes()
    forward, kept, of_input = storages.most - before, storages.alive - before - size, sum(each.alive for each in lent)
    backward, edge = 0, get_gradient_edge(output) if output.requires_grad else None
    gradient = torch.empty_like(output)
    lent += [_Lent(storages, output), _Lent(storages, gradient)]
    del output
    log.clear()
    if edge is not None:
        storages.most = storages.alive
        run_backward(edge, gradient)
        backward = storages.most - before
    entry.leave()
    del edge, gradient
    if case.recompute == FULL:  # what such a block keeps is its input, or a part of it
        of_input, kept, backward = of_input + kept, 0, backward - kept
    waiting = storages.alive + sum(each.alive for each in lent)
    late.clear()
    deferred = waiting - storages.alive - sum(each.alive for each in lent)
    unit = UnitBytes(of_input, kept, size, forward, backward, deferred)
    return MeasuredUnit(unit, UnitWork(forward_work, log.work()))


def hidden_of(run: Run, stage: Stage) -> Tensor:
    """The hidden states with which a unit begins, [s(/t), b, h], without numbers."""
    length = run.model.seq_length // (stage.layout.tp.size if stage.layout.sequence_parallel else 1)
    size = length, run.schedule.micro_batch_size, run.model.hidden_size
    return torch.empty(size, dtype=stage.layout.dtype, device=DEVICE)
