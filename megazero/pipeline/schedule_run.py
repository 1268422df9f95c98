"""One pass over an instruction list: its state between the instructions.

Memory: a stage's output is freed as soon as its message is sent. Its backward starts from the output's nodes in the
autograd graph (`GradientEdge`), for which the output is not needed. A stage's input is freed as soon as no unit of the
stage needs it (`GraphEntry`). What a stage or a unit takes and hands on may be several tensors (`mpu.bundle`), of which
some have no gradient. Where a list cuts a chunk into units, the same holds for each unit. For the second part of a
split backward the model state keeps the layers' inputs and the gradients of their outputs. What a unit keeps for its
backward leaves the device where the list says so (`pipeline.kept`). Losses are summed on the device, and the host does
not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.mpu.bundle import Bundle, BundleType, Gradients, MessageSpec, tensors_of, with_tensors
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
from megazero.program.passes.leaving import most_pieces
from megazero.program.shape import RankShape


class PassBatch(Protocol):
    """A micro-batch, a dataclass of which the pass reads nothing: stages do. `MicroBatch` is one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def loss_factor(self) -> Tensor | None: ...


class GraphEntry:
    """The beginning of a graph: a hidden state enters the graph here, and the hidden state's gradient arrives here.

    An entry does not keep the hidden state. A leaf tensor would, until the backward; with an entry the hidden state is
    freed as soon as no unit of the graph needs it.
    """

    def __init__(self, chunk: int = 0, unit: int = 0) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()
        self.graded: tuple[bool, ...] = (True,)
        self.at = chunk, unit
        """Of a computation: the rank's own number of its chunk, and its first unit there."""
        self.is_closed = False
        """Whether no backward is under way that ends here."""

    def enter(self, hidden: BundleType, graded: tuple[bool, ...] = (True,)) -> BundleType:
        """The hidden state as tensors whose gradients are wanted. graded: which of its tensors these are."""
        self.graded, tensors = graded, [*tensors_of(hidden)]
        wanted = [number for number, is_graded in enumerate(graded) if is_graded]
        if wanted:
            # Detached: of a leaf that needs a gradient a graph holds the place where it is added up, and so the leaf.
            recorded = tensors[wanted[0]].new_empty(0).requires_grad_()
            for number, entered in zip(
                wanted, _Enter.apply(recorded, self, *(tensors[number].detach() for number in wanted)), strict=True
            ):
                tensors[number] = entered
        return with_tensors(hidden, tensors)

    def leave(self) -> Gradients:
        """The gradients that have arrived, for each tensor of the hidden state. The entry lets go of them: what waits
        in a split backward keeps the graph alive, and the graph its entry.
        """
        gradients, self.gradients = iter(self.gradients), ()
        return tuple(next(gradients, None) if is_graded else None for is_graded in self.graded)


class GradientBeside(RuntimeError):
    """A gradient reaches a computation by another way than from the computation behind it. chunk, unit: its own."""

    def __init__(self, chunk: int, unit: int) -> None:
        super().__init__(f"a gradient reaches unit {unit} of chunk {chunk} beside what units hand to each other")
        self.chunk, self.unit = chunk, unit


class _Enter(torch.autograd.Function):
    """(an empty tensor that has the graph recorded, entry, tensors of a hidden state) -> these tensors."""

    @staticmethod
    def forward(ctx: Any, recorded: Tensor, entry: GraphEntry, *hidden: Tensor) -> tuple[Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if ctx.entry.is_closed:
            raise GradientBeside(*ctx.entry.at)
        ctx.entry.gradients = grads
        return None, None, *(None for _ in grads)


@dataclass(frozen=True)
class StageParts:
    """What a pass works with on a rank: see `pipeline.engine.PipelineEngine`.

    model_chunks  the number of chunks of the whole model
    messages      by boundary between two model chunks
    reads         which buckets an instruction reads
    host          where activations go that leave the device; None: the lists say of none
    computed      called after each computation
    watch         called with the pass before each instruction, when the parameters that it reads are there
    """

    stages: tuple[nn.Module, ...]
    model_chunks: int
    messages: Sequence[MessageSpec]
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
        micro_batches: Sequence[PassBatch],
        end: StepEnd | None = None,
        *,
        trains: bool,
        loss_sum: Tensor | None = None,
    ) -> None:
        self.parts, self.state, self.end, self.trains = parts, parts.state, end, trains
        self.micro_batches = micro_batches
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device) if loss_sum is None else loss_sum
        self.loss_factor: Tensor | None = None
        self.arriving: dict[tuple[bool, Pass], tuple[tuple[Tensor, ...], CommunicationHandle | None]] = {}
        """Inputs of chunks, hidden states (False) and gradients (True): posted receives, or tensors from a chunk of
        this rank.
        """
        self.leaving: dict[tuple[bool, Pass], tuple[Tensor, ...]] = {}
        """Tensors that wait for their send."""
        self.between: dict[Pass, Bundle] = {}
        """The hidden state that one unit of a chunk has handed to the next."""
        self.given: dict[Pass, Gradients] = {}
        """The gradients that one unit of a chunk has handed to the unit before."""
        self.own: dict[int, int] = {}
        """From the model chunks of this rank to its own numbers of them."""
        self.entries: dict[ComputationKey, GraphEntry] = {}
        self.edges: dict[ComputationKey, tuple[GradientEdge | None, ...]] = {}
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
        if self.parts.host is not None:
            self.parts.host.expect(most_pieces(instructions))
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
        left = self.arriving or self.leaving or self.between or self.given or self.entries or self.edges or self.kept
        assert not left, "the list left something undone"

    # --- computations ----------------------------------------------------------------------------------------------

    def _forward(self, i: Instruction) -> None:
        units, count = self._units(i), len(self.parts.shape.units[i.chunk])
        where, key = (i.micro_batch, i.chunk), self._key(i)
        hidden, graded = self._input(i, units.start)
        if hidden is not None and self.trains and any(graded):
            self.entries[key] = GraphEntry(i.chunk, units.start)
            hidden = self.entries[key].enter(hidden, graded)
            self.entries[key].is_closed = True
        with self.kept[key].recording() if key in self.kept else nullcontext():
            output: Bundle = self.parts.stages[i.chunk](hidden, self.micro_batches[i.micro_batch], i.units)
        tensors = tensors_of(output)
        if self.trains:
            # None: no parameter so far is trained (a chunk with a frozen embedding only).
            self.edges[key] = tuple(get_gradient_edge(each) if each.requires_grad else None for each in tensors)
        detached = [each.detach() for each in tensors]
        if units.stop < count:
            of_graph = [self.trains and each.requires_grad for each in tensors]
            self.between[where] = with_tensors(
                output, [each.requires_grad_(graded) for each, graded in zip(detached, of_graph, strict=True)]
            )
        elif i.model_chunk == self.parts.model_chunks - 1:
            (loss,) = detached
            self.loss_sum += loss
            if self.loss_factor is not None:
                # The gradient that the loss's backward starts from: d(factor * loss) / d(loss).
                self.arriving[True, where] = (self.loss_factor.to(loss),), None
        else:
            message = self.parts.messages[i.model_chunk]
            if not message.fits(output):
                raise ValueError(f"model chunk {i.model_chunk} hands on {MessageSpec.of(output)}, and not {message}")
            self._hand_on(False, i, tuple(detached))

    def _input(self, i: Instruction, unit: int) -> tuple[Bundle | None, tuple[bool, ...]]:
        """(the hidden state that a computation begins with, which of its tensors have a gradient). A stage's input has
        one, for which the stage before waits; a unit's has one where it is needed.
        """
        where = i.micro_batch, i.chunk
        if unit:
            hidden = self.between.pop(where)
            return hidden, tuple(each.requires_grad for each in tensors_of(hidden))
        if i.model_chunk == 0:
            return None, ()
        spec, arrived = self.parts.messages[i.model_chunk - 1], self._arrived(False, where)
        if len(arrived) > 1 and self._key(i) in self.kept:
            # They share the memory of their message: one that travels on would have all of them stay.
            arrived = tuple(each.clone() for each in arrived)
        return spec.bundle(arrived), tuple(each.graded for each in spec.tensors)

    def _backward(self, i: Instruction) -> None:
        units, count = self._units(i), len(self.parts.shape.units[i.chunk])
        where, key = (i.micro_batch, i.chunk), self._key(i)
        if key in self.kept:
            self.kept.pop(key).ready()
        edges = self.edges.pop(key)
        # none where the next unit's graph begins with no input of this one: all in front of it is frozen
        gradients = (self.given.pop(where) if units.stop < count else self._gradients(i)) or (None,) * len(edges)
        if key in self.entries:
            self.entries[key].is_closed = False
        self.state.gradients.before_backward(key if i.op is Op.BACKWARD_INPUT else None)
        both = [
            (edge, gradient)
            for edge, gradient in zip(edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if both:
            torch.autograd.backward([edge for edge, _ in both], [gradient for _, gradient in both])
        self.state.gradients.after_backward()
        given = self.entries.pop(key).leave() if key in self.entries else ()
        if units.start:
            self.given[where] = given
        elif i.model_chunk > 0:
            before = self.parts.messages[i.model_chunk - 1]
            self._hand_on(True, i, before.whole(given or (None,) * len(before.tensors), self.parts.device))

    def _gradients(self, i: Instruction) -> Gradients:
        """The gradients of what a chunk has made: of its loss, or of the hidden state that the next chunk took."""
        arrived = self._arrived(True, (i.micro_batch, i.chunk))
        is_last = i.model_chunk == self.parts.model_chunks - 1
        return arrived if is_last else self.parts.messages[i.model_chunk].gradients(arrived)

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

    def _arrived(self, backward: bool, where: Pass) -> tuple[Tensor, ...]:
        tensors, handle = self.arriving.pop((backward, where))
        if handle is not None:
            handle.wait()
        return tensors

    def _hand_on(self, backward: bool, i: Instruction, tensors: tuple[Tensor, ...]) -> None:
        """Pass tensors to the next chunk if that is on this rank, else to the send that follows."""
        taker = self.own.get(i.model_chunk + (-1 if backward else 1))
        if taker is None:
            self.leaving[backward, (i.micro_batch, i.chunk)] = tensors
        else:
            self.arriving[backward, (i.micro_batch, taker)] = tensors, None

    def _message(self, i: Instruction) -> MessageSpec:
        """That of a transfer."""
        message = self.parts.messages[i.boundary]
        return message.back if i.is_backward else message

    def _send(self, i: Instruction) -> None:
        assert self.parts.channels is not None
        tensors = self.leaving.pop((i.is_backward, (i.micro_batch, i.chunk)))
        self.parts.channels.send(self._message(i).pack(tensors, self.parts.device), i.peer, self._tag(i))

    def _receive(self, i: Instruction) -> None:
        assert self.parts.channels is not None
        message = self._message(i)
        buffer = message.buffer(self.parts.device)
        handle = self.parts.channels.receive(buffer, i.peer, self._tag(i))
        self.arriving[i.is_backward, (i.micro_batch, i.chunk)] = message.parts(buffer), handle

    def _tag(self, i: Instruction) -> Tag:
        return Tag(i.is_backward, i.boundary, i.micro_batch)
