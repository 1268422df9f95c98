"""One pass over an instruction list: its state between the instructions.

Memory: a stage's output is freed as soon as its message is sent. Its backward starts from the output's node in the
autograd graph (`GradientEdge`), for which the output is not needed. A stage's input is freed as soon as no unit of the
stage needs it (`GraphEntry`). Where a list cuts a chunk into units, the same holds for each unit. For the second part
of a split backward the model state keeps the layers' inputs and the gradients of their outputs. What a unit keeps
for its backward leaves the device where the list says so (`pipeline.kept`). Losses are summed on the device, and the
host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.model.batch import MicroBatch
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.p2p import Channels, Tag
from megazero.pipeline.actions import ActivationActions, KeptGraph, StateActions, StepEnd
from megazero.program.effects import ParametersRead
from megazero.program.instruction import (
    ACTIVATION_MOVES,
    LEAVE,
    UPDATE,
    UPDATE_HOST,
    ComputationKey,
    Instruction,
    Kind,
    Op,
)
from megazero.program.passes.cut import Pass, units_of
from megazero.program.shape import RankShape


class GraphEntry:
    """The beginning of a graph: a hidden state enters the graph here, and the hidden state's gradient arrives here.

    An entry does not keep the hidden state. A leaf tensor would, until the backward; with an entry the hidden state is
    freed as soon as no unit of the graph needs it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """The hidden state as a tensor whose gradient is wanted."""
        # Detached: of a leaf that needs a gradient a graph holds the place where it is added up, and so the leaf.
        entered: Tensor = _Enter.apply(hidden.new_empty(0).requires_grad_(), hidden.detach(), self)
        return entered

    def leave(self) -> Tensor | None:
        """The gradient that has arrived. The entry lets go of it: what waits in a split backward keeps the graph alive,
        and the graph its entry.
        """
        gradient, self.gradient = self.gradient, None
        return gradient


class _Enter(torch.autograd.Function):
    """(an empty tensor that has the graph recorded, hidden, entry) -> hidden."""

    @staticmethod
    def forward(ctx: Any, recorded: Tensor, hidden: Tensor, entry: GraphEntry) -> Tensor:
        ctx.entry = entry
        return hidden.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.entry.gradient,) = grads
        return None, None, None


@dataclass(frozen=True)
class StageParts:
    """What a pass works with on a rank: see `pipeline.engine.PipelineEngine`.

    model_chunks  the number of chunks of the whole model
    reads         which buckets an instruction reads
    host          where activations go that leave the device; None: the lists say of none
    computed      called after each computation
    watch         called with the pass before each instruction, when the parameters that it reads are there
    """

    stages: tuple[nn.Module, ...]
    model_chunks: int
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channels: Channels | None
    shape: RankShape
    reads: ParametersRead
    state: StateActions
    host: ActivationActions | None = None
    computed: Callable[[], None] | None = None
    watch: Callable[[ScheduleRun, Instruction], None] | None = None


class ScheduleRun:
    """The state of one pass over an instruction list. All its tables are empty at the end.

    `run` is the whole pass. The same can be done by `begin`, `execute` for consecutive parts of the list, and `finish`.

    end       what NORM and UPDATE do; None: an evaluation, or a pass that ends before them
    trains    whether backwards follow
    loss_sum  a 0-dim float64 tensor to which losses are added; default: a new one
    """

    def __init__(
        self,
        parts: StageParts,
        micro_batches: Sequence[MicroBatch],
        end: StepEnd | None = None,
        *,
        trains: bool,
        loss_sum: Tensor | None = None,
    ) -> None:
        self.parts, self.state, self.end, self.trains = parts, parts.state, end, trains
        self.micro_batches = micro_batches
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device) if loss_sum is None else loss_sum
        self.loss_factor: Tensor | None = None
        self.arriving: dict[tuple[bool, Pass], tuple[Tensor, CommunicationHandle | None]] = {}
        """Inputs of chunks, hidden states (False) and gradients (True): posted receives, or tensors from a chunk of
        this rank.
        """
        self.leaving: dict[tuple[bool, Pass], Tensor] = {}
        """Tensors that wait for their send."""
        self.between: dict[tuple[bool, Pass], Tensor | None] = {}
        """What one unit of a chunk has handed to the next: a hidden state (False) or a gradient (True)."""
        self.own: dict[int, int] = {}
        """From the model chunks of this rank to its own numbers of them."""
        self.entries: dict[ComputationKey, GraphEntry] = {}
        self.edges: dict[ComputationKey, GradientEdge | None] = {}
        self.kept: dict[ComputationKey, KeptGraph] = {}
        """Graphs whose activations leave the device."""
        self.actions: dict[Kind, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_FORWARD: self._send,
            Op.SEND_BACKWARD: self._send,
            Op.RECV_FORWARD: self._receive,
            Op.RECV_BACKWARD: self._receive,
            Op.NORM: self._norm,
            UPDATE: self._update,
            UPDATE_HOST: self._update,
            **dict.fromkeys(ACTIVATION_MOVES, lambda i: self.kept[self._key(i)].move(i.op)),
            **parts.state.by_kind,
        }

    def run(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        self.begin(instructions, loss_factor)
        self.execute(instructions)
        self.finish()

    def begin(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        """Prepare to execute these instructions."""
        self.loss_factor = loss_factor
        if loss_factor is not None:
            self.micro_batches = [replace(batch, loss_factor=loss_factor) for batch in self.micro_batches]
        self.own = {i.model_chunk: i.chunk for i in instructions if i.is_compute}
        for i in instructions:
            if i.op == LEAVE:
                assert self.parts.host is not None, "nothing takes what leaves the device"
                self.kept[self._key(i)] = self.parts.host.graph(i.where)

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Execute the next instructions of the list. Each waits for the parameters that it reads."""
        for instruction in instructions:
            if read := self.parts.reads(instruction):
                self.state.ready(read)
            if self.parts.watch is not None:
                self.parts.watch(self, instruction)
            self.actions[instruction.op](instruction)
            if self.parts.computed is not None and instruction.is_compute:
                self.parts.computed()

    def finish(self) -> None:
        """Wait until all sends are complete. Called after the last instruction."""
        if self.parts.channels is not None:
            self.parts.channels.flush()
        left = self.arriving or self.leaving or self.between or self.entries or self.edges or self.kept
        assert not left, "the list left something undone"

    # --- computations ----------------------------------------------------------------------------------------------

    def _forward(self, i: Instruction) -> None:
        units, count = self._units(i), len(self.parts.shape.units[i.chunk])
        where, key = (i.micro_batch, i.chunk), self._key(i)
        if units.start:
            hidden = self.between.pop((False, where))
        else:
            hidden = self._arrived(False, where) if i.model_chunk > 0 else None
        if hidden is not None and self.trains and (hidden.requires_grad or not units.start):
            # A stage's input has a gradient, for which the stage before waits; a unit's has one where it is needed.
            self.entries[key] = GraphEntry()
            hidden = self.entries[key].enter(hidden)
        with self.kept[key].recording() if key in self.kept else nullcontext():
            output = self.parts.stages[i.chunk](hidden, self.micro_batches[i.micro_batch], i.units)
        if self.trains:
            # None: no parameter so far is trained (a chunk with a frozen embedding only).
            self.edges[key] = get_gradient_edge(output) if output.requires_grad else None
        if units.stop < count:
            self.between[False, where] = output.detach().requires_grad_(self.trains and output.requires_grad)
        elif i.model_chunk == self.parts.model_chunks - 1:
            self.loss_sum += output.detach()
            if self.loss_factor is not None:
                # The gradient that the loss's backward starts from: d(factor * loss) / d(loss).
                self.arriving[True, where] = self.loss_factor.to(output), None
        else:
            self._hand_on(False, i, output.detach())

    def _backward(self, i: Instruction) -> None:
        units, count = self._units(i), len(self.parts.shape.units[i.chunk])
        where, key = (i.micro_batch, i.chunk), self._key(i)
        if key in self.kept:
            self.kept.pop(key).ready()
        edge = self.edges.pop(key)
        gradient = self.between.pop((True, where)) if units.stop < count else self._arrived(True, where)
        self.state.gradients.before_backward(key if i.op is Op.BACKWARD_INPUT else None)
        if edge is not None:
            assert gradient is not None, "a unit's output has a gradient, but not the next unit's input"
            torch.autograd.backward([edge], [gradient])
        self.state.gradients.after_backward()
        given = self.entries.pop(key).leave() if key in self.entries else None
        if units.start:
            self.between[True, where] = given
        elif i.model_chunk > 0:
            assert given is not None, "a stage's output does not depend on its input"
            self._hand_on(True, i, given)

    def _backward_weight(self, i: Instruction) -> None:
        self.state.gradients.run_deferred(self._key(i))

    def _units(self, i: Instruction) -> range:
        return units_of(i, self.parts.shape)

    def _key(self, i: Instruction) -> ComputationKey:
        return i.micro_batch, i.chunk, self._units(i).start

    # --- the end of a step -----------------------------------------------------------------------------------------

    def _norm(self, i: Instruction) -> None:
        assert self.end is not None
        self.end.norm(self.loss_sum)

    def _update(self, i: Instruction) -> None:
        assert self.end is not None
        self.end.update(i)

    # --- hidden states and their gradients -------------------------------------------------------------------------

    def _arrived(self, backward: bool, where: Pass) -> Tensor:
        tensor, handle = self.arriving.pop((backward, where))
        if handle is not None:
            handle.wait()
        return tensor

    def _hand_on(self, backward: bool, i: Instruction, tensor: Tensor) -> None:
        """Pass a tensor to the next chunk if that is on this rank, else to the send that follows."""
        assert tensor.shape == self.parts.hidden_shape and tensor.dtype == self.parts.dtype, (
            tensor.shape,
            tensor.dtype,
        )
        taker = self.own.get(i.model_chunk + (-1 if backward else 1))
        if taker is None:
            self.leaving[backward, (i.micro_batch, i.chunk)] = tensor
        else:
            self.arriving[backward, (i.micro_batch, taker)] = tensor, None

    def _send(self, i: Instruction) -> None:
        assert self.parts.channels is not None
        tensor = self.leaving.pop((i.is_backward, (i.micro_batch, i.chunk)))
        self.parts.channels.send(tensor.contiguous(), i.peer, self._tag(i))

    def _receive(self, i: Instruction) -> None:
        assert self.parts.channels is not None
        buffer = torch.empty(self.parts.hidden_shape, dtype=self.parts.dtype, device=self.parts.device)
        handle = self.parts.channels.receive(buffer, i.peer, self._tag(i))
        self.arriving[i.is_backward, (i.micro_batch, i.chunk)] = buffer, handle

    def _tag(self, i: Instruction) -> Tag:
        return Tag(i.is_backward, i.boundary, i.micro_batch)
