"""Steps over micro-batches of any shapes: messages between stages depend on these, so each has an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megazero.own.stage import OwnBatch, OwnStage, shapes_of
from megazero.pipeline.actions import StepEnd
from megazero.pipeline.engine import PipelineEngine


class ShapedEngine:
    """A `pipeline.engine.StepEngine` of a user's stages. On several stages all micro-batches of a step have one shape.

    is_cut    whether the model is on several stages
    make      makes the engine for micro-batches of the shapes of one
    forget    has the model state forget the gradients that have come
    """

    def __init__(
        self,
        stages: Sequence[OwnStage],
        make: Callable[[OwnBatch], PipelineEngine],
        forget: Callable[[], None],
        *,
        is_cut: bool,
    ) -> None:
        self._stages, self._make, self._forget, self._is_cut = tuple(stages), make, forget, is_cut
        self._engines: dict[object, PipelineEngine] = {}

    @property
    def stages(self) -> Sequence[nn.Module]:
        """This rank's chunks."""
        return self._stages

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the model's last chunk."""
        return self._stages[-1].has_loss

    @property
    def counted(self) -> Tensor | float:
        """The number that the losses of the last step, or evaluation, are a sum over: 0-dim float64, to which a step
        adds when it computes; 0 on ranks without the model's last chunk.
        """
        return self._stages[-1].counted if self.has_loss else 0.0

    def warm_up(self, micro_batches: Sequence[OwnBatch], loss_factor: Tensor) -> None:
        """Run a step without messages first, if these shapes need that (`PipelineEngine.warm_up`). Called in front of
        each step, before what the step before has left is taken over.
        """
        engine = self._of(micro_batches)
        if not engine.is_warm[True]:
            with self._without_trace():
                engine.warm_up(micro_batches, loss_factor)
                self._forget()

    def train(
        self,
        micro_batches: Sequence[OwnBatch],
        loss_factor: Tensor,
        end: StepEnd | None = None,
        *,
        owed: bool = False,
        early: bool = False,
    ) -> Tensor:
        """See `PipelineEngine.train`."""
        self._forget_counts()
        return self._of(micro_batches).train(micro_batches, loss_factor, end, owed=owed, early=early)

    def settle(self, end: StepEnd) -> None:
        """See `PipelineEngine.settle`."""
        next(iter(self._engines.values())).settle(end)  # which sends nothing between stages

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[OwnBatch]) -> Tensor:
        """See `PipelineEngine.evaluate`."""
        engine = self._of(micro_batches)
        if not engine.is_warm[False]:
            with self._without_trace():
                engine.warm_up_evaluation(micro_batches)
        self._forget_counts()
        return engine.evaluate(micro_batches)

    def _of(self, micro_batches: Sequence[OwnBatch]) -> PipelineEngine:
        shapes = shapes_of(micro_batches[0].tensors)
        for number, batch in enumerate(micro_batches if self._is_cut else ()):
            if shapes_of(batch.tensors) != shapes:
                raise ValueError(
                    f"micro-batch {number} of a step has other names, shapes or dtypes than the first: the stages of a "
                    "pipeline send messages of one length. Pad them alike"
                )
        if shapes not in self._engines:
            self._engines[shapes] = self._make(micro_batches[0])
        return self._engines[shapes]

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """A context behind which buffers are as before: a pass without messages (`pipeline.warm_up`) computes with
        numbers that are made up.
        """
        before = [(buffer, buffer.clone()) for stage in self._stages for buffer in stage.buffers()]
        yield
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    def _forget_counts(self) -> None:
        for stage in self._stages:
            stage.counted.zero_()
