"""The steps of a run in order, from any point on: number, samples, batch size and learning rate of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.batch_schedule import BatchSchedule
from megazero.config.schema import ScheduleConfig
from megazero.optim.lr_schedule import LearningRate


@dataclass(frozen=True)
class Step:
    """One step. `consumed_samples` includes the step's own samples, `consumed_before` does not."""

    iteration: int
    consumed_before: int
    consumed_samples: int
    global_batch_size: int
    lr: float


class StepPlan:
    """The steps of the run that a schedule describes.

    `after` and `steps` continue from any state, also from one that a run with other batch sizes has left. `step` and
    `total_iterations` describe a run from sample 0. Raises the errors of `BatchSchedule` and `LearningRate`.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.config, self.batches, self.rate = config, BatchSchedule(config), LearningRate(config)

    def after(self, iterations: int, consumed: int) -> Step:
        """The step that follows `iterations` iterations and `consumed` samples."""
        size = self.batches.size(consumed)
        return Step(iterations + 1, consumed, consumed + size, size, self.rate.at(iterations, consumed))

    def step(self, iteration: int) -> Step:
        """Step number `iteration` (from 1) of a run from sample 0. Raises ValueError below 1."""
        if iteration < 1:
            raise ValueError(f"iteration {iteration}: the first one is 1")
        return self.after(iteration - 1, self.batches.consumed_after(iteration - 1))

    def finished(self, iterations: int, consumed: int) -> bool:
        """Whether the run is at its end: its iterations are done, or its samples do not suffice for another step."""
        if self.config.train_samples is not None:
            return consumed + self.batches.size(consumed) > self.config.train_samples
        return self.config.train_iters is not None and iterations >= self.config.train_iters

    def at_end(self, iterations: int, consumed: int) -> str:
        """Why the run is `finished` at this state, which may be beyond its end: a longer run may have got there."""
        length, samples, iters = self.config.train_length, self.config.train_samples, self.config.train_iters
        why = f"iteration {iterations} is the run's last"
        if length is not None and samples is not None and consumed > samples:
            why = f"{consumed:,} samples are trained, which is more than {length.behind('--train-length')}"
        elif length is not None and iters is not None and iterations > iters:
            why = f"iteration {iterations:,} is reached, which is beyond {length.behind('--train-length')}"
        return f"nothing left to train: {why}"

    def steps(self, iterations: int = 0, consumed: int = 0) -> Iterator[Step]:
        """The steps that remain after this state, in order."""
        while not self.finished(iterations, consumed):
            step = self.after(iterations, consumed)
            yield step
            iterations, consumed = step.iteration, step.consumed_samples

    def consumed_at_end(self, iterations: int = 0, consumed: int = 0) -> int:
        """Samples that are consumed at the end of a run that continues from this state. The run must have an end."""
        size, full = self.batches.size, self.batches.full
        while size(consumed) < full and not self.finished(iterations, consumed):
            iterations, consumed = iterations + 1, consumed + size(consumed)
        if self.config.train_samples is not None:
            left = (self.config.train_samples - consumed) // full
        else:
            assert self.config.train_iters is not None, "a run with an end"
            left = self.config.train_iters - iterations
        return consumed + max(0, left) * full

    @property
    def total_iterations(self) -> int | None:
        """Number of steps of the whole run; None for a run without end."""
        if self.config.train_samples is not None:
            return self.batches.iterations_within(self.config.train_samples)
        return self.config.train_iters
