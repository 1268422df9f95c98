"""Global batch size as a function of consumed samples.

The ramp START INCREMENT SAMPLES is Megatron-LM's: it has n = (global batch - START) / INCREMENT increments over SAMPLES
samples. An iteration before which c samples are consumed has `START + int(c / (SAMPLES / n)) * INCREMENT` samples, and
the full global batch once c > SAMPLES. BLOOM's was 192 16 9765625 up to 2048, with n = 116.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megazero.config.schema import ScheduleConfig


@dataclass(frozen=True)
class Phase:
    """Consecutive iterations of one batch size.

    before    iterations before the first of them
    consumed  samples before the first of them
    size      samples of each of them
    """

    before: int
    consumed: int
    size: int


class BatchSchedule:
    """The global batch of every iteration of a run that starts at sample 0.

    A step asks `size`, which takes any number of consumed samples. The other methods follow the run's own iterations
    from sample 0; their cost does not depend on the number of iterations. Raises ValueError where no number of
    increments leads from START to the global batch.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.full = config.global_batch_size
        self.start, self.increment, self.samples = config.rampup_batch_size or (self.full, 1, 0)
        if self.start > self.full or self.increment < 1 or (self.full - self.start) % self.increment:
            raise ValueError(
                f"--rampup-batch-size {self.start} {self.increment}: no number of increments leads from {self.start} "
                f"to --global-batch-size {self.full}"
            )
        self.increments = (self.full - self.start) // self.increment

    def size(self, consumed: int) -> int:
        """Global batch size of the iteration before which `consumed` samples are consumed."""
        if self.increments == 0 or consumed > self.samples:
            return self.full
        steps = int(consumed / (self.samples / self.increments))
        return min(self.start + steps * self.increment, self.full)

    def _phases(self) -> Iterator[Phase]:
        before = consumed = 0
        while True:
            size = self.size(consumed)
            yield Phase(before, consumed, size)
            if size == self.full:
                return
            # The first iteration of the next phase, guessed from the boundary and put right by the formula itself:
            # the boundary is a float quotient, and the formula's rounding of it is what counts.
            steps = (size - self.start) // self.increment
            boundary = min((steps + 1) * (self.samples / self.increments), self.samples)
            iterations = max(1, math.ceil((boundary - consumed) / size))
            while iterations > 1 and self.size(consumed + (iterations - 1) * size) != size:
                iterations -= 1
            while self.size(consumed + iterations * size) == size:
                iterations += 1
            before, consumed = before + iterations, consumed + iterations * size

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The run's batch sizes in order; the last phase never ends."""
        return tuple(self._phases())

    def consumed_after(self, iterations: int) -> int:
        """Samples that the first `iterations` iterations consume."""
        phase = self.phases[bisect_right(self.phases, iterations, key=lambda p: p.before) - 1]
        return phase.consumed + (iterations - phase.before) * phase.size

    def iterations_within(self, samples: int) -> int:
        """Number of iterations for which `samples` samples suffice."""
        phase = self.phases[bisect_right(self.phases, samples, key=lambda p: p.consumed) - 1]
        whole = phase.before + (samples - phase.consumed) // phase.size
        following = self.phases[self.phases.index(phase) + 1 :]
        return min(whole, following[0].before) if following else whole
