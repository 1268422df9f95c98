"""One interpreter for every schedule: it goes through this rank's list and does what each instruction says.

Shapes: `hidden_shape` is what travels between stages, [s, b, h], or [s/t, b, h] under sequence parallelism. Only hidden
states and their gradients travel; each stage takes tokens, labels and masks from its own copy of the micro-batch.

Memory: a stage's output is dropped as soon as its message is sent, and its backward starts from the output's place in
the graph (`GradientEdge`), which needs no output. A stage's input lives until its backward. What a split backward
leaves for its second part (inputs of layers and gradients of their outputs) is the sink's until then. Nothing here
waits for the device: losses are added up on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.model.batch import MicroBatch
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels, Tag
from megazero.pipeline.instruction import Instruction, Op
from megazero.pipeline.schedule import forward_only


class GradientSink(Protocol):
    """Who gathers and reduces gradients. The first two calls surround each backward of each chunk (own number)."""

    def before_backward(self, chunk: int, reduce: bool, defer: int | None = None) -> None:
        """reduce: the gradients of this backward complete the chunk's sum, or are reduced at every micro-batch.
        defer: this backward, of the micro-batch of that number, is for the input; gradients of weights can wait."""

    def after_backward(self, chunk: int) -> None:
        """Every gradient of this backward has been accumulated, or put off."""

    def run_deferred(self, chunk: int, micro_batch: int, reduce: bool) -> None:
        """Accumulate what the backward of this micro-batch put off. reduce: as above."""


Key = tuple[int, int]
"""(micro-batch, own chunk)."""


class PipelineEngine:
    """Runs micro-batches through this rank's stages (model chunks), with its neighbours.

    stages        the rank's chunks in order: modules called with (hidden or None, MicroBatch). They return hidden
                  states; the model's last chunk returns the sum of token losses, 0-dim
    schedule_of   the training list of this rank for a number of micro-batches
    hidden_shape  of every message, in `dtype`
    channels      the way to the neighbours; None only with one stage
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        grid: ProcessGrid,
        schedule_of: Callable[[int], Sequence[Instruction]],
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
        channels: Channels | None,
    ) -> None:
        assert channels is not None or grid.pp.size == 1
        self.stages, self.grid, self.schedule_of = list(stages), grid, schedule_of
        self.hidden_shape, self.dtype, self.channels = hidden_shape, dtype, channels
        self.model_chunks = grid.pp.size * len(self.stages)

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the model's last chunk, so that the loss is known here."""
        return any(i.model_chunk == self.model_chunks - 1 for i in self.schedule_of(1))

    def train(self, micro_batches: Sequence[MicroBatch], loss_factor: Tensor, sink: GradientSink) -> Tensor:
        """Forward and backward of every micro-batch; gradients go to the parameters and the sink.

        loss_factor  0-dim: what each micro-batch's summed loss is multiplied by before its backward
        Returns the sum of token losses over the micro-batches, not multiplied, as a 0-dim float64 tensor on the device;
        0 on ranks without the head. Raises PeerError when a neighbour fails.
        """
        step = ScheduleRun(self, micro_batches, sink)
        step.run(self.schedule_of(len(micro_batches)), loss_factor)
        return step.loss_sum

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The loss sum as `train` returns it, without gradients and in the modules' evaluation mode."""
        was_training = [stage.training for stage in self.stages]
        for stage in self.stages:
            stage.eval()
        step = ScheduleRun(self, micro_batches, None)
        try:
            with torch.no_grad():
                step.run(forward_only(self.schedule_of(len(micro_batches))), None)
        finally:
            for stage, training in zip(self.stages, was_training, strict=True):
                stage.train(training)
        return step.loss_sum


class ScheduleRun:
    """What is alive in one pass over a list. Every table is empty again at its end.

    `run` is the whole pass. `begin`, `execute` of parts of the list in their order, and `finish` are the same.
    loss_sum: a 0-dim float64 tensor that the losses are added to; default: a new one.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        micro_batches: Sequence[MicroBatch],
        sink: GradientSink | None,
        loss_sum: Tensor | None = None,
    ) -> None:
        self.engine, self.micro_batches, self.sink = engine, micro_batches, sink
        self.loss_sum = (
            torch.zeros((), dtype=torch.float64, device=engine.grid.device) if loss_sum is None else loss_sum
        )
        self.loss_factor: Tensor | None = None
        self.arriving: dict[tuple[bool, Key], tuple[Tensor, CommunicationHandle | None]] = {}
        """Hidden states (False) and gradients (True) for a chunk: posted receives, or handed over by a chunk of this
        rank.
        """
        self.leaving: dict[tuple[bool, Key], Tensor] = {}
        """What the next send takes."""
        self.own: dict[int, int] = {}
        """Own number of each model chunk that is here."""
        self.inputs: dict[Key, Tensor] = {}
        self.edges: dict[Key, GradientEdge | None] = {}

    def run(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        self.begin(instructions, loss_factor)
        self.execute(instructions)
        self.finish()

    def begin(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        """Before the first of these instructions."""
        self.loss_factor = loss_factor
        if loss_factor is not None:
            self.micro_batches = [replace(batch, loss_factor=loss_factor) for batch in self.micro_batches]
        self.own = {i.model_chunk: i.chunk for i in instructions}

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """The next of the list."""
        actions = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_FORWARD: self._send,
            Op.SEND_BACKWARD: self._send,
            Op.RECV_FORWARD: self._receive,
            Op.RECV_BACKWARD: self._receive,
        }
        for instruction in instructions:
            actions[instruction.op](instruction)

    def finish(self) -> None:
        """After the last: what is under way has arrived, and nothing is left."""
        if self.engine.channels is not None:
            self.engine.channels.flush()
        assert not (self.arriving or self.leaving or self.inputs or self.edges), "the schedule left something undone"

    def _forward(self, i: Instruction) -> None:
        key = i.micro_batch, i.chunk
        hidden = self._arrived(False, key) if i.model_chunk > 0 else None
        if hidden is not None and self.sink is not None:
            self.inputs[key] = hidden.requires_grad_()
        output = self.engine.stages[i.chunk](hidden, self.micro_batches[i.micro_batch])
        if self.sink is not None:
            # None: nothing up to here is trained (a frozen embedding alone in its chunk).
            self.edges[key] = get_gradient_edge(output) if output.requires_grad else None
        if i.model_chunk == self.engine.model_chunks - 1:
            self.loss_sum += output.detach()
            if self.loss_factor is not None:
                # The gradient that the loss's backward starts from: d(factor * loss) / d(loss).
                self.arriving[True, key] = self.loss_factor.to(output), None
        else:
            assert output.shape == self.engine.hidden_shape and output.dtype == self.engine.dtype, (
                output.shape,
                output.dtype,
            )
            self._hand_on(False, i, output.detach())

    def _backward(self, i: Instruction) -> None:
        key = i.micro_batch, i.chunk
        edge = self.edges.pop(key)
        gradient = self._arrived(True, key)
        assert self.sink is not None
        self.sink.before_backward(i.chunk, i.reduce, i.micro_batch if i.op is Op.BACKWARD_INPUT else None)
        if edge is not None:
            torch.autograd.backward([edge], [gradient])
        self.sink.after_backward(i.chunk)
        if i.model_chunk > 0:
            input_gradient = self.inputs.pop(key).grad
            assert input_gradient is not None, "a stage's output does not depend on its input"
            self._hand_on(True, i, input_gradient)

    def _backward_weight(self, i: Instruction) -> None:
        assert self.sink is not None
        self.sink.run_deferred(i.chunk, i.micro_batch, i.reduce)

    def _arrived(self, backward: bool, key: Key) -> Tensor:
        tensor, handle = self.arriving.pop((backward, key))
        if handle is not None:
            handle.wait()
        return tensor

    def _hand_on(self, backward: bool, i: Instruction, tensor: Tensor) -> None:
        """To the chunk that takes it, if that is here, else to the send that follows."""
        taker = self.own.get(i.model_chunk + (-1 if backward else 1))
        if taker is None:
            self.leaving[backward, (i.micro_batch, i.chunk)] = tensor
        else:
            self.arriving[backward, (i.micro_batch, taker)] = tensor, None

    def _send(self, i: Instruction) -> None:
        assert self.engine.channels is not None
        tensor = self.leaving.pop((i.is_backward, (i.micro_batch, i.chunk)))
        self.engine.channels.send(tensor.contiguous(), i.peer, self._tag(i))

    def _receive(self, i: Instruction) -> None:
        assert self.engine.channels is not None
        buffer = torch.empty(self.engine.hidden_shape, dtype=self.engine.dtype, device=self.engine.grid.device)
        handle = self.engine.channels.receive(buffer, i.peer, self._tag(i))
        self.arriving[i.is_backward, (i.micro_batch, i.chunk)] = buffer, handle

    def _tag(self, i: Instruction) -> Tag:
        return Tag(i.is_backward, i.boundary, i.micro_batch)
