"""One interpreter for every schedule: it executes the instructions of this rank's list in order.

Messages between stages are hidden states and their gradients: [s, b, h], or [s/t, b, h] under sequence parallelism.
Each stage reads tokens, labels and masks from its own copy of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megazero.model.batch import MicroBatch
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.pipeline.instruction import Instruction
from megazero.pipeline.schedule import forward_only
from megazero.pipeline.schedule_run import GradientSink, ScheduleRun, StageParts
from megazero.pipeline.warm_up import warm_up


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
        self.stages, self.schedule_of = tuple(stages), schedule_of
        self.model_chunks = grid.pp.size * len(stages)
        self.parts = StageParts(self.stages, self.model_chunks, hidden_shape, dtype, grid.device, channels)
        self.is_warm = dict.fromkeys((True, False), grid.pp.size == 1 or grid.pp.is_on_host)
        """Whether training and evaluation may begin with messages: see `pipeline.warm_up`."""

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the model's last chunk and so computes the loss."""
        return any(i.model_chunk == self.model_chunks - 1 for i in self.schedule_of(1))

    def warm_up(self, micro_batch: MicroBatch, loss_factor: Tensor, sink: GradientSink) -> None:
        """Run the computations of a step without messages (`pipeline.warm_up`), before the first `train`.

        The sink must forget the gradients afterwards. All ranks call it. Communicates what stages and sink do.
        """
        warm_up(self.parts, self.schedule_of(2), micro_batch, loss_factor, sink)
        self.is_warm[True] = True

    def train(self, micro_batches: Sequence[MicroBatch], loss_factor: Tensor, sink: GradientSink) -> Tensor:
        """Forward and backward of every micro-batch. Gradients go to the sink.

        loss_factor  0-dim: factor of each micro-batch's summed loss in backward

        Returns the sum of token losses over the micro-batches, without the factor, as a 0-dim float64 tensor on the
        device; 0 on ranks without the head. Communicates hidden states and their gradients with neighbouring stages,
        and what the stages and the sink communicate. Raises PeerError when a neighbour fails.
        """
        step = ScheduleRun(self.parts, micro_batches, sink)
        step.run(self.schedule_of(len(micro_batches)), loss_factor)
        return step.loss_sum

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of token losses as in `train`, without gradients and in the modules' evaluation mode."""
        was_training = [stage.training for stage in self.stages]
        for stage in self.stages:
            stage.eval()
        step = ScheduleRun(self.parts, micro_batches, None)
        try:
            with torch.no_grad():
                if not self.is_warm[False]:
                    warm_up(self.parts, forward_only(self.schedule_of(1)), micro_batches[0])
                self.is_warm[False] = True
                step.run(forward_only(self.schedule_of(len(micro_batches))), None)
        finally:
            for stage, training in zip(self.stages, was_training, strict=True):
                stage.train(training)
        return step.loss_sum
