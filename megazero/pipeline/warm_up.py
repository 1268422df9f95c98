"""The computations of a stage once, before any message.

At the first launch of a kernel CUDA loads its module, libraries choose algorithms, and the allocator asks the driver
for memory. Each of these may wait until the device has run all that was queued on it. With NCCL a posted receive is
queued on the device until its message comes. Receives are posted one computation ahead. So a first launch would wait
for a message, and the stage that is to send the message would wait for this one. `tests/pipeline/test_warm_up.py` has a
model of it: most schedules would hang in their first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.model.batch import MicroBatch
from megazero.pipeline.instruction import Instruction
from megazero.pipeline.schedule_run import GradientSink, Key, ScheduleRun, StageParts


def warm_up(
    parts: StageParts,
    instructions: Sequence[Instruction],
    micro_batch: MicroBatch,
    loss_factor: Tensor | None = None,
    sink: GradientSink | None = None,
) -> None:
    """Run the computations of a list, every micro-batch of it this one, without messages between stages.

    instructions  of a step of two micro-batches: its first gradients are written and later ones added, by different
                  kernels. Without a sink of forward passes only
    loss_factor, sink  as in `PipelineEngine.train`; None for an evaluation

    Inputs and gradients that would arrive are made up, so the caller has the sink forget what it got. Communicates what
    layers and sink do within the stage: all ranks of a stage call it together.
    """
    computations = [i for i in instructions if i.is_compute]
    step = _Alone(parts, [micro_batch] * (1 + max(i.micro_batch for i in computations)), sink)
    step.begin(computations, loss_factor)
    step.execute(computations)


class _Alone(ScheduleRun):
    """A pass over the computations of one rank: what would arrive is made up, what would leave is dropped."""

    def _arrived(self, backward: bool, key: Key) -> Tensor:
        if (backward, key) in self.arriving:  # the gradient of the loss
            return super()._arrived(backward, key)
        return torch.ones(self.parts.hidden_shape, dtype=self.parts.dtype, device=self.parts.device)

    def _hand_on(self, backward: bool, i: Instruction, tensor: Tensor) -> None:
        del backward, i, tensor
