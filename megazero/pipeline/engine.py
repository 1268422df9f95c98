"""One interpreter for every step: it executes the instructions of this rank's list in order.

It knows no feature by name. What a list asks of model state, `pipeline.actions.StateActions` does. Messages between
stages are what one unit hands to the next, and its gradients (`mpu.bundle`): hidden states [s, b, h], or [s/t, b, h]
under sequence parallelism. Each stage reads tokens, labels and masks from its own copy of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.model.evaluation import evaluating
from megazero.mpu.bundle import MessageSpec
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.pipeline.actions import ActivationActions, NoState, StateActions, StepEnd
from megazero.pipeline.schedule_run import PassBatch, ScheduleRun, StageParts
from megazero.pipeline.warm_up import LonePass
from megazero.program.effects import ParametersRead
from megazero.program.instruction import Instruction
from megazero.program.shape import RankShape


class StepLists(Protocol):
    """The lists of a rank, by number of micro-batches (`program.step.Lists`)."""

    @property
    def shape(self) -> RankShape: ...

    def training(self, micro_batches: int, *, owed: bool = False, early: bool = False) -> Sequence[Instruction]: ...

    def evaluation(self, micro_batches: int) -> Sequence[Instruction]: ...

    def settling(self) -> Sequence[Instruction]: ...


class StepEngine(Protocol):
    """What makes the steps of a loop, as `PipelineEngine` does."""

    @property
    def stages(self) -> Sequence[nn.Module]: ...

    @property
    def has_loss(self) -> bool: ...

    def train(
        self,
        micro_batches: Sequence[Any],
        loss_factor: Tensor,
        end: StepEnd | None = None,
        *,
        owed: bool = False,
        early: bool = False,
    ) -> Tensor: ...

    def settle(self, end: StepEnd) -> None: ...

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor: ...


class PipelineEngine:
    """Runs micro-batches through this rank's stages (model chunks), together with the neighbouring ranks.

    stages        the rank's chunks in order: modules called with (hidden or None, MicroBatch, units or None). They
                  return hidden states; the model's last chunk returns the sum of token losses, 0-dim
    lists         the lists of training and evaluation
    messages      by boundary: number n is between model chunks n and n + 1
    channels      sends and receives between neighbours; None only with one stage
    state         parameters and gradients; default: parameters that are always there and are not trained
    host          memory for activations that leave the device; None: the lists say of none
    computed      called after each computation
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        grid: ProcessGrid,
        lists: StepLists,
        messages: Sequence[MessageSpec],
        channels: Channels | None,
        state: StateActions | None = None,
        host: ActivationActions | None = None,
        computed: Callable[[], None] | None = None,
    ) -> None:
        assert channels is not None or grid.pp.size == 1
        self.stages, self.lists = tuple(stages), lists
        self.model_chunks = grid.pp.size * len(stages)
        assert len(messages) == self.model_chunks - 1, (len(messages), self.model_chunks)
        self.parts = StageParts(
            self.stages,
            self.model_chunks,
            messages,
            grid.device,
            channels,
            lists.shape,
            ParametersRead(lists.shape),
            state or NoState(),
            host,
            computed,
        )
        self._sends_at_once = grid.pp.size == 1 or grid.pp.is_on_host
        self.cool()

    @property
    def has_loss(self) -> bool:
        """Whether this rank holds the model's last chunk and so computes the loss."""
        return any(i.model_chunk == self.model_chunks - 1 for i in self.lists.training(1))

    def cool(self) -> None:
        """Have the next step and evaluation warm up, if the backend needs that: something else will compute."""
        self.is_warm = dict.fromkeys((True, False), self._sends_at_once)
        """Whether training (True) and evaluation (False) may send messages: see `pipeline.warm_up`."""

    def warm_up(self, micro_batches: Sequence[PassBatch], loss_factor: Tensor) -> None:
        """Run a step without messages (`pipeline.warm_up`), before the first `train`, with its arguments.

        The model state must forget the gradients afterwards: first it makes the updates that a step has left. All ranks
        call it. Communicates what stages and model state do.
        """
        self.parts.state.settle()
        LonePass(self.parts, micro_batches, trains=True).run(self.lists.training(len(micro_batches)), loss_factor)
        self.is_warm[True] = True

    def warm_up_evaluation(self, micro_batches: Sequence[PassBatch]) -> None:
        """As `warm_up`, for `evaluate`, which calls it if nobody has."""
        with torch.no_grad(), evaluating(self._modules()):
            LonePass(self.parts, micro_batches, trains=False).run(self.lists.evaluation(len(micro_batches)), None)
        self.is_warm[False] = True

    def train(
        self,
        micro_batches: Sequence[PassBatch],
        loss_factor: Tensor,
        end: StepEnd | None = None,
        *,
        owed: bool = False,
        early: bool = False,
    ) -> Tensor:
        """A whole step: forward and backward of every micro-batch, and what else the list says.

        loss_factor  0-dim: factor of each micro-batch's summed loss in backward
        end          what NORM and UPDATE do; None: a list without them
        owed         whether the list makes the updates that the step before has left
        early        whether it makes some updates before its norm

        Returns the sum of token losses over the micro-batches, without the factor, as a 0-dim float64 tensor on the
        device; 0 on ranks without the head. Communicates hidden states and their gradients with neighbouring stages,
        and what stages, model state and `end` communicate. Raises PeerError when a neighbour fails.
        """
        step = ScheduleRun(self.parts, micro_batches, end, trains=True)
        step.run(self.lists.training(len(micro_batches), owed=owed, early=early), loss_factor)
        return step.loss_sum

    def settle(self, end: StepEnd) -> None:
        """Make the updates that the last step has left, or has to make again, and no others. All ranks call it.
        Communicates gathers of parameters.
        """
        ScheduleRun(self.parts, (), end, trains=False).run(self.lists.settling(), None)

    def evaluate(self, micro_batches: Sequence[PassBatch]) -> Tensor:
        """The sum of token losses as in `train`, without gradients and in the modules' evaluation mode."""
        self.parts.state.settle()
        if not self.is_warm[False]:
            self.warm_up_evaluation(micro_batches)
        step = ScheduleRun(self.parts, micro_batches, trains=False)
        with torch.no_grad(), evaluating(self._modules()):
            step.run(self.lists.evaluation(len(micro_batches)), None)
        return step.loss_sum

    def _modules(self) -> Iterator[nn.Module]:
        return (module for stage in self.stages for module in stage.modules())
