"""One pass over an instruction list: its state between the instructions.

Memory: a stage's output is freed as soon as its message is sent. Its backward starts from the output's node in the
autograd graph (`GradientEdge`), for which the output is not needed. A stage's input is kept until its backward. For the
second part of a split backward the sink keeps the layers' inputs and the gradients of their outputs. Losses are summed
on the device, and the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.model.batch import MicroBatch
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.p2p import Channels, Tag
from megazero.pipeline.instruction import Instruction, Op


@dataclass(frozen=True)
class StageParts:
    """What a pass works with on a rank: see `pipeline.engine.PipelineEngine`.

    model_chunks: the number of chunks of the whole model.
    """

    stages: tuple[nn.Module, ...]
    model_chunks: int
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channels: Channels | None


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


class ScheduleRun:
    """The state of one pass over an instruction list. All its tables are empty at the end.

    `run` is the whole pass. The same can be done by `begin`, `execute` for consecutive parts of the list, and `finish`.
    loss_sum: a 0-dim float64 tensor to which losses are added; default: a new one.
    """

    def __init__(
        self,
        parts: StageParts,
        micro_batches: Sequence[MicroBatch],
        sink: GradientSink | None,
        loss_sum: Tensor | None = None,
    ) -> None:
        self.parts, self.micro_batches, self.sink = parts, micro_batches, sink
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=parts.device) if loss_sum is None else loss_sum
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
        if self.parts.channels is not None:
            self.parts.channels.flush()
        assert not (self.arriving or self.leaving or self.inputs or self.edges), "the schedule left something undone"

    def _forward(self, i: Instruction) -> None:
        key = i.micro_batch, i.chunk
        hidden = self._arrived(False, key) if i.model_chunk > 0 else None
        if hidden is not None and self.sink is not None:
            self.inputs[key] = hidden.requires_grad_()
        output = self.parts.stages[i.chunk](hidden, self.micro_batches[i.micro_batch])
        if self.sink is not None:
            # None: no parameter so far is trained (a chunk with a frozen embedding only).
            self.edges[key] = get_gradient_edge(output) if output.requires_grad else None
        if i.model_chunk == self.parts.model_chunks - 1:
            self.loss_sum += output.detach()
            if self.loss_factor is not None:
                # The gradient that the loss's backward starts from: d(factor * loss) / d(loss).
                self.arriving[True, key] = self.loss_factor.to(output), None
        else:
            assert output.shape == self.parts.hidden_shape and output.dtype == self.parts.dtype, (
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
