"""One interpreter for every schedule: it executes the instructions of this rank's list in order.

Messages between stages are hidden states and their gradients: [s, b, h], or [s/t, b, h] under sequence parallelism.
Each stage reads tokens, labels and masks from its own copy of the micro-batch.

Memory: a stage's output is freed as soon as its message is sent. Its backward starts from the output's node in the
autograd graph (`GradientEdge`), for which the output is not needed. A stage's input is kept until its backward. For the
second part of a split backward the sink keeps the layers' inputs and the gradients of their outputs. Losses are summed
on the device, and the host does not wait for it.
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
    """Accumulates and reduces gradients. The engine calls it around each backward of a chunk (own number)."""

    def before_backward(self, chunk: int, reduce: bool, defer: int | None = None) -> None:
        """Called before a backward.

        reduce  reduce the chunk's gradients in this backward: it is the chunk's last one, or every one reduces
        defer   number of the micro-batch if this is the input part of a split backward. Gradients of weights can then
                wait for `run_deferred`
        """

    def after_backward(self, chunk: int) -> None:
        """Called after a backward: each of its gradients has been accumulated or deferred."""

    def run_deferred(self, chunk: int, micro_batch: int, reduce: bool) -> None:
        """Accumulate the gradients that the backward of this micro-batch deferred. reduce: as in `before_backward`."""


Key = tuple[int, int]
"""(micro-batch, the stage's own number of the chunk)."""


class PipelineEngine:
    """Runs micro-batches through this rank's stages (model chunks), together with the neighbouring ranks.

    stages        the rank's chunks in order: modules called with (hidden or None, MicroBatch). They return hidden
                  states; the model's last chunk returns the sum of token losses, 0-dim
    schedule_of   from a number of micro-batches to this rank's training list
    hidden_shape  shape of every message
    dtype         dtype of every message
    channels      sends and receives between neighbours; None only with one stage
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
        """Whether this rank holds the model's last chunk and so computes the loss."""
        return any(i.model_chunk == self.model_chunks - 1 for i in self.schedule_of(1))

    def train(self, micro_batches: Sequence[MicroBatch], loss_factor: Tensor, sink: GradientSink) -> Tensor:
        """Forward and backward of every micro-batch. Gradients go to the sink.

        loss_factor  0-dim: factor of each micro-batch's summed loss in backward

        Returns the sum of token losses over the micro-batches, without the factor, as a 0-dim float64 tensor on the
        device; 0 on ranks without the head. Communicates hidden states and their gradients with neighbouring stages,
        and what the stages and the sink communicate. Raises PeerError when a neighbour fails.
        """
        step = ScheduleRun(self, micro_batches, sink)
        step.run(self.schedule_of(len(micro_batches)), loss_factor)
        return step.loss_sum

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of token losses as in `train`, without gradients and in the modules' evaluation mode."""
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
    """The state of one pass over an instruction list. All its tables are empty at the end.

    `run` is the whole pass. The same can be done by `begin`, `execute` for consecutive parts of the list, and `finish`.
    loss_sum: a 0-dim float64 tensor to which losses are added; default: a new one.
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
        """Inputs of chunks, hidden states (False) and gradients (True): posted receives, or tensors from a chunk of
        this rank.
        """
        self.leaving: dict[tuple[bool, Key], Tensor] = {}
        """Tensors that wait for their send."""
        self.own: dict[int, int] = {}
        """From the model chunks of this rank to its own numbers of them."""
        self.inputs: dict[Key, Tensor] = {}
        self.edges: dict[Key, GradientEdge | None] = {}

    def run(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        self.begin(instructions, loss_factor)
        self.execute(instructions)
        self.finish()

    def begin(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        """Prepare to execute these instructions."""
        self.loss_factor = loss_factor
        if loss_factor is not None:
            self.micro_batches = [replace(batch, loss_factor=loss_factor) for batch in self.micro_batches]
        self.own = {i.model_chunk: i.chunk for i in instructions}

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Execute the next instructions of the list."""
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
        """Wait until all sends are complete. Called after the last instruction."""
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
            # None: no parameter so far is trained (a chunk with a frozen embedding only).
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
        """Pass a tensor to the next chunk if that is on this rank, else to the send that follows."""
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
