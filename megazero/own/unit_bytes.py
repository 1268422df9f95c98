"""Bytes that each unit of a model takes for a micro-batch, measured where the unit computes.

torch's meta device would choose other kernels of attention, which keep other tensors. So a unit runs forward and
backward on the device of the run, one unit at a time in memory, as `own.units.stage` runs it, and `pipeline.storages`
counts what it makes. It runs twice: what is made once and then kept (tables of angles) is there from the second time.

Units hand on tensors that several of them may keep, so these have numbers. A unit's parameters, the micro-batch, and
the gradient of its output belong to others and are not counted; neither is memory that a kernel takes for itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.stateless import _reparametrize_module

from megazero.config.schema import Run
from megazero.mpu.bundle import Bundle, tensors_of, with_tensors
from megazero.own.settings import dtype_of_all
from megazero.own.unit_parts import UnitParts, cut_units
from megazero.own.units.model import BatchTensors, Model, OwnUnit
from megazero.own.units.refusals import micro_batches
from megazero.own.units.stage import OwnBatch, OwnStage
from megazero.own.units.taken_tensors import taken_dtype
from megazero.pipeline.schedule_run import GraphEntry
from megazero.pipeline.storages import ComputedStorages, lone_owners
from megazero.system.collector import without_collections


@dataclass(frozen=True)
class OwnUnitBytes:
    """Bytes of one unit for one micro-batch.

    kept      from its forward to its backward, beside its input
    forward   the most that its forward holds, its output included and its input not
    backward  the most that its backward holds, `kept` and its input's gradient included, and its output's gradient and
              its input not
    inner     the same with its output's gradient, which goes when it is used, of a unit that is one graph with the next
    takes     numbers of the tensors that it takes of the unit before
    hands     of those that it hands on
    holds     of those among these, and those that it hands on, that it keeps
    gradients
              bytes of the gradients of its input
    """

    kept: int
    forward: int
    backward: int
    inner: int
    takes: tuple[int, ...]
    hands: tuple[int, ...]
    holds: tuple[int, ...]
    gradients: int


@dataclass(frozen=True)
class OwnModelBytes:
    """Those of all units of a model.

    handed   bytes of the tensors that units hand on, by number: those that share memory are one, of a micro-batch's
             own there are none
    buffers  bytes of the buffers of each unit
    """

    units: tuple[OwnUnitBytes, ...]
    handed: tuple[int, ...]
    buffers: tuple[int, ...]


OF_OTHERS = -1
"""The number of a tensor in memory that is no unit's: the micro-batch's, a parameter's or a buffer's."""


def unit_bytes(model: Model, batch: BatchTensors, run: Run, device: torch.device) -> OwnModelBytes:
    """The bytes of each unit of a model on a device, in forward order: on one of tp ranks.

    batch: a micro-batch of a step. The model is as before behind it. Memory: one unit, and what it keeps for backward.

    Communicates nothing. Raises ValueError with a unit's name for what the unit returns.
    """
    taken, dtype = micro_batches(batch, device)[0].tensors, dtype_of_all(run)
    units, sizes, handed = list[OwnUnitBytes](), list[int](), _Handed(None, ())
    # what a unit leaves in cycles is freed at no moment that is counted
    with without_collections(), torch.enable_grad(), cut_units(model, run) as parts:
        for unit in model.called_units:
            measuring = _Measuring(unit, parts, taken, run, device)
            with unit.without_trace(), ComputedStorages(lone_owners()) as storages:
                measuring.measured(handed, storages, [*sizes])
                measured, handed = measuring.measured(handed, storages, sizes)
            units.append(measured)
    buffers = (sum(_buffer_bytes(each, dtype) for each in unit.buffers()) for unit in model.called_units)
    return OwnModelBytes(tuple(units), tuple(sizes), tuple(buffers))


def _buffer_bytes(buffer: Tensor, dtype: torch.dtype | None) -> int:
    return buffer.numel() * taken_dtype(buffer, dtype).itemsize


@dataclass(frozen=True)
class _Handed:
    """What one unit hands to the next. numbers: of each of its tensors, or `OF_OTHERS`."""

    bundle: Bundle | None
    numbers: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.bundle is None else tensors_of(self.bundle)

    @property
    def by_storage(self) -> dict[int, int]:
        """The numbers by storage."""
        return {_storage(each): number for each, number in zip(self.tensors, self.numbers, strict=True)}

    @property
    def own_numbers(self) -> tuple[int, ...]:
        """The numbers without those of others."""
        return tuple(sorted({*self.numbers} - {OF_OTHERS}))

    def copied(self) -> _Handed:
        """The same in other memory, as leaves of a graph. Tensors that share memory still do."""
        copies, made = dict[int, torch.UntypedStorage](), list[Tensor]()
        for tensor in self.tensors:
            if _storage(tensor) not in copies:
                copies[_storage(tensor)] = tensor.untyped_storage().clone()
            place = copies[_storage(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride()
            made.append(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            made[-1].set_(*place)
            made[-1].requires_grad_(tensor.requires_grad)
        return self if self.bundle is None else _Handed(with_tensors(self.bundle, made), self.numbers)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Lives:
    """Which tensors that are handed on somebody has still. numbers: of these."""

    def __init__(self) -> None:
        self._refs = dict[int, weakref.ref[Any]]()

    def follow(self, handed: _Handed) -> None:
        for tensor, number in zip(handed.tensors, handed.numbers, strict=True):
            if number != OF_OTHERS:
                self._refs[number] = weakref.ref(tensor.untyped_storage())

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for number, storage in self._refs.items() if storage() is not None)


class _Measuring:
    """One unit as a stage of its own."""

    def __init__(self, unit: OwnUnit, parts: UnitParts, batch: BatchTensors, run: Run, device: torch.device) -> None:
        again = run.parallel.recompute_granularity == "full"
        is_last = unit is parts.model.called_units[-1]
        self._stage = OwnStage([unit], has_loss=is_last, computes_again=again, keeps_buffers=False, device=device)
        self._batch, self._is_last = OwnBatch(batch), is_last
        tensors = parts.tensors(unit, device)
        self._tensors = {f"chunk.0.{name}": tensor for name, tensor in tensors.items()}
        self._of_others = (*tensors.values(), *batch.values())
        for tensor in {id(each): each for each in tensors.values() if each.requires_grad}.values():
            tensor.register_post_accumulate_grad_hook(_forget_gradient)

    def measured(self, handed: _Handed, storages: ComputedStorages, sizes: list[int]) -> tuple[OwnUnitBytes, _Handed]:
        """The bytes of a forward and a backward, and what the unit hands on. handed: what it takes. sizes: of what is
        handed on, by number, to which that of the unit is added.
        """
        storages.leave_out(self._of_others)
        with _reparametrize_module(self._stage, dict(self._tensors)):
            inner, _ = self._passed(handed, storages, [*sizes], has_gradient=True)
            unit, handed_on = self._passed(handed, storages, sizes, has_gradient=False)
        return replace(unit, inner=inner.backward), handed_on

    def _passed(
        self, handed: _Handed, storages: ComputedStorages, sizes: list[int], *, has_gradient: bool
    ) -> tuple[OwnUnitBytes, _Handed]:
        """has_gradient: whether the gradient of its output is the unit's, as that of a unit within a graph is."""
        entry, before, first, lives = GraphEntry(), storages.alive, len(sizes), _Lives()
        hidden: Bundle | None = None
        known = dict.fromkeys(map(_storage, self._of_others), OF_OTHERS)
        if handed.bundle is not None:
            given = handed.copied()
            assert given.bundle is not None
            storages.leave_out(given.tensors)
            lives.follow(given)
            known |= given.by_storage
            hidden = entry.enter(given.bundle, tuple(each.requires_grad for each in given.tensors))
            del given
        storages.most = storages.alive
        made: Bundle = self._stage(hidden, self._batch)
        del hidden
        forward, output = storages.most - before, self._numbered(made, known, sizes)
        handed_on, (edges, gradients) = output.copied(), _ends(output, storages, has_gradient=has_gradient)
        storages.leave_out(handed_on.tensors)
        lives.follow(output)
        del made, output
        kept, backward = storages.alive - before, 0
        holds = lives.numbers
        if edges:
            storages.most = storages.alive
            torch.autograd.backward(edges, gradients)
            backward = storages.most - before
        entry.leave()
        if self._is_last:  # its loss is a number
            handed_on, holds = _Handed(None, ()), tuple(number for number in holds if number < first)
            del sizes[first:]
        of_gradients = sum(each.nbytes for each in handed.tensors if each.requires_grad)
        numbers = handed.own_numbers, handed_on.own_numbers, holds
        return OwnUnitBytes(kept, forward, backward, 0, *numbers, of_gradients), handed_on

    @staticmethod
    def _numbered(made: Bundle, known: dict[int, int], sizes: list[int]) -> _Handed:
        """What the unit hands on, with a new number for each tensor in memory that is not known."""
        numbers = list[int]()
        for tensor in tensors_of(made):
            if _storage(tensor) not in known:
                known[_storage(tensor)] = len(sizes)
                sizes.append(tensor.untyped_storage().nbytes())
            numbers.append(known[_storage(tensor)])
        return _Handed(made, tuple(numbers))


def _ends(
    output: _Handed, storages: ComputedStorages, *, has_gradient: bool
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Where the backward of a unit begins, and the gradients with which it does. has_gradient: as of `_passed`."""
    graded = [each for each in output.tensors if each.requires_grad]
    gradients = [torch.ones_like(each) for each in graded]
    if has_gradient and graded:
        begins: Tensor = _Given.apply(gradients, *graded)
        return [get_gradient_edge(begins)], [torch.ones_like(begins)]
    storages.leave_out(gradients)
    return [get_gradient_edge(each) for each in graded], gradients


class _Given(torch.autograd.Function):
    """(gradients, tensors) -> a number whose backward hands the gradients of the tensors out, which nobody else has."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *made: Tensor) -> Tensor:
        ctx.gradients = gradients
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None
