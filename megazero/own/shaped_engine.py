"""Steps over micro-batches of any shapes: messages between stages depend on these, so each has an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from megazero.own.units.model import OwnUnit
from megazero.own.units.stage import OwnBatch, OwnStage, shapes_of
from megazero.pipeline.actions import StepEnd
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.schedule_run import GradientBeside


class ShapedEngine:
    """A `pipeline.engine.StepEngine` of a user's stages. On several stages all micro-batches of a step have one shape.

    is_cut    whether the model is on several stages
    make      makes the engine for micro-batches of the shapes of one
    forget    has the model state forget the gradients that have come
    taken     the number of gradients that have come so far

    is_broken  whether an error has left a step or an evaluation in its midst
    """

    def __init__(
        self,
        stages: Sequence[OwnStage],
        make: Callable[[OwnBatch], PipelineEngine],
        forget: Callable[[], None],
        taken: Callable[[], int],
        *,
        is_cut: bool,
    ) -> None:
        self._stages, self._make, self._forget, self._is_cut = tuple(stages), make, forget, is_cut
        self._taken, self._taken_in_steps, self.is_broken = taken, 0, False
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
        self._require_whole()
        if not engine.is_warm[True]:
            with self._without_trace():
                engine.warm_up(micro_batches, loss_factor)
                self._forget()
            self._taken_in_steps = self._taken()

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
        engine = self._of(micro_batches)
        if self._taken() != self._taken_in_steps:
            raise RuntimeError(
                "gradients have come to parameters of the units in a backward that is not the engine's, and are among "
                "those of its steps: call such a backward on a copy of the modules"
            )
        self._prove(is_on=True)
        with self._to_its_end():
            loss = engine.train(micro_batches, loss_factor, end, owed=owed, early=early)
        self._prove(is_on=False)
        self._taken_in_steps = self._taken()
        return loss

    def _prove(self, *, is_on: bool) -> None:
        """Whether units that are cut among tp ranks are compared with whole ones: not in a pass whose numbers are made
        up.
        """
        for stage in self._stages:
            stage.proves = is_on

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
        self._prove(is_on=True)
        with self._to_its_end():
            loss = engine.evaluate(micro_batches)
        self._prove(is_on=False)
        return loss

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

    def _require_whole(self) -> None:
        if self.is_broken:
            raise RuntimeError(
                "a step or an evaluation of this engine has raised an error: its gradients, and parameters of its "
                "units, are as they were in its midst. Go on from a checkpoint with another engine"
            )

    @contextmanager
    def _to_its_end(self) -> Iterator[None]:
        """A context that cannot be entered any more once an error has left it."""
        self._require_whole()
        self.is_broken = True
        try:
            yield
        except GradientBeside as error:
            unit = self._stages[error.chunk].units()[error.unit]
            name = unit.name if isinstance(unit, OwnUnit) else error.unit
            raise RuntimeError(
                f"a gradient reaches unit {name!r} beside what the unit returns: a unit behind it has taken one of its "
                "tensors by another way, such as an attribute. In this layout units compute one by one. Let the "
                "units between hand that tensor on, in a tuple or a dict"
            ) from error
        self.is_broken = False

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """A context behind which units are as before: a pass without messages (`pipeline.warm_up`) computes with
        numbers that are made up.
        """
        before = [(buffer, buffer.clone()) for stage in self._stages for buffer in stage.buffers()]
        with ExitStack() as contexts:
            for unit in (unit for stage in self._stages for unit in stage.units()):
                assert isinstance(unit, OwnUnit)
                contexts.enter_context(unit.without_trace())
            yield
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

    def _forget_counts(self) -> None:
        for stage in self._stages:
            stage.counted.zero_()
