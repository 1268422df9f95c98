"""CUDA graphs: a micro-batch is captured once and replayed, so that the host launches one graph and no single kernels.

Forward and backward of a micro-batch are captured together, on a rank that holds the whole model in one chunk. A replay
runs none of the Python code, so all that this code decides must be the same every time. A graph works on fixed memory:
parameters, the replicated gradient column, copies of a micro-batch's tensors and of the loss factor, the sum of the
losses. Micro-batches differ in whether gradients are written or added, so there are two graphs. They share one memory
pool: they never run at the same time, and neither keeps anything there that the other needs.

With several dp ranks, or early updates, the first micro-batch (whose forward waits for the parameters of each unit) and
the last (whose backward reduces or updates bucket by bucket) run without a graph; the others are replayed. The graphs
keep the memory of a micro-batch's activations for good. Evaluation and micro-batches without a graph need memory in
addition to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.model.batch import MicroBatch
from megazero.pipeline.actions import Gradients, StepEnd
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.schedule_run import ScheduleRun
from megazero.program.instruction import Instruction, Op
from megazero.system.streams import GraphCapture

WARM_UP = 2
"""Steps without graphs before the first capture, in which libraries are initialised and kernels are loaded."""


class ReplayedGradients(Gradients, Protocol):
    """Gradients whose record of those that have arrived can be read and set, since a replay does not call it."""

    def arrived(self) -> Any: ...

    def say_arrived(self, arrived: Any) -> None: ...


def replayed(micro_batches: int, travels: bool) -> range:
    """The micro-batches of a step that are replayed. travels: whether gradients and parameters travel over dp."""
    return range(1, max(1, micro_batches - 1)) if travels else range(micro_batches)


class GraphedEngine:
    """A `PipelineEngine` of one stage and one chunk whose training step replays micro-batches.

    gradients: those of the engine's model state. travels: whether gradients and parameters travel beside a micro-batch:
    over dp, whose group has a handle then, or for early updates. A graph could not wait for them. Evaluation uses no
    graph.
    """

    def __init__(
        self, engine: PipelineEngine, gradients: ReplayedGradients, capture: GraphCapture, *, travels: bool
    ) -> None:
        assert engine.model_chunks == 1, "a graph holds the whole model"
        self.gradients = gradients
        self.engine, self.capture, self.travels = engine, capture, travels
        self.steps = 0
        self._graphs: dict[bool, tuple[Callable[[], None], Any]] = {}
        self._ready: set[bool] = set()
        """The kinds of micro-batch (whether gradients are added) that have run once on the capture stream without a
        graph, so that their one-time initialisation is not captured.
        """
        self._batch: MicroBatch | None = None
        self._loss_sum: Tensor | None = None

    @property
    def stages(self) -> Sequence[nn.Module]:
        """See `PipelineEngine`."""
        return self.engine.stages

    @property
    def has_loss(self) -> bool:
        """See `PipelineEngine.has_loss`."""
        return self.engine.has_loss

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """See `PipelineEngine.evaluate`."""
        return self.engine.evaluate(micro_batches)

    def release(self) -> None:
        """Free the graphs: NCCL's communicators wait, when they are destroyed, for graphs that captured them.

        A later step would capture them again.
        """
        self._graphs.clear()

    def settle(self, end: StepEnd) -> None:
        """See `PipelineEngine.settle`."""
        self.engine.settle(end)

    def train(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_factor: Tensor,
        end: StepEnd | None = None,
        *,
        owed: bool = False,
        early: bool = False,
    ) -> Tensor:
        """As `PipelineEngine.train`, with the same bits if the kernels are deterministic."""
        self.steps += 1
        if self.steps <= WARM_UP:
            self._ready |= {number > 0 for number in range(len(micro_batches))}
            return self.capture.on_side_stream(
                lambda: self.engine.train(micro_batches, loss_factor, end, owed=owed, early=early)
            )
        loss_sum = self._prepare(micro_batches[0], loss_factor)
        instructions = self.engine.lists.training(len(micro_batches), owed=owed, early=early)
        replays = replayed(len(micro_batches), self.travels)
        last_units = {i.micro_batch: number for number, i in enumerate(instructions) if i.op is Op.FORWARD}
        step = ScheduleRun(self.engine.parts, micro_batches, end, trains=True, loss_sum=loss_sum)
        step.begin(instructions, loss_factor)
        for number, i in enumerate(instructions):
            if i.micro_batch not in replays:
                step.execute([i])
            elif number == last_units[i.micro_batch]:  # late updates may stand between the units of a forward
                # a replay would not wait for host memory's updates
                self.engine.parts.state.ready(self.engine.lists.shape.trained)
                self._replay(micro_batches[i.micro_batch], adds=i.micro_batch > 0)
        step.finish()
        return loss_sum.clone()

    def _prepare(self, batch: MicroBatch, loss_factor: Tensor) -> Tensor:
        """Create the fixed tensors on the first call, set the loss factor, and return the loss sum, set to 0."""
        if self._batch is None or self._loss_sum is None:
            self._batch = replace(_each(torch.clone, batch), loss_factor=loss_factor.clone())
            self._loss_sum = torch.zeros((), dtype=torch.float64, device=loss_factor.device)
        assert self._batch.loss_factor is not None
        self._batch.loss_factor.copy_(loss_factor)
        return self._loss_sum.zero_()

    def _replay(self, batch: MicroBatch, *, adds: bool) -> None:
        """Forward and backward of a micro-batch. adds: add its gradients to those that are there."""
        assert self._batch is not None
        _each(lambda fixed, new: fixed.copy_(new, non_blocking=True), self._batch, batch)
        if adds not in self._ready:
            self._ready.add(adds)
            self.capture.on_side_stream(self._one)
            return
        if adds not in self._graphs:
            self._graphs[adds] = self.capture.record(self._one), self.gradients.arrived()
        replay, arrived = self._graphs[adds]
        replay()
        if not adds:
            self.gradients.say_arrived(arrived)

    def _one(self) -> None:
        """Forward and backward of the fixed micro-batch."""
        assert self._batch is not None
        instructions = [Instruction(op, 0, 0, model_chunk=0) for op in (Op.FORWARD, Op.BACKWARD)]
        step = ScheduleRun(self.engine.parts, [self._batch], trains=True, loss_sum=self._loss_sum)
        step.run(instructions, self._batch.loss_factor)


def _each(act: Callable[..., Tensor], *batches: MicroBatch) -> MicroBatch:
    """Apply `act` to the tensors of micro-batches, field by field. loss_factor and past are left out."""

    def of(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        missing = [value is None for value in values]
        assert all(missing) or not any(missing), f"only some micro-batches have {name}"
        return None if values[0] is None else act(*values)

    return MicroBatch(of("tokens"), of("labels"), of("loss_mask"), of("samples"), of("documents"), of("positions"))
