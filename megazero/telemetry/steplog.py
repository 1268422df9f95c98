"""Steps wait here, tensors on their device, until the log interval; then one transfer reads them and the sinks get
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megazero.telemetry.record import Rates, Scalar, Sink, StepValues, read_scalars, resolve_step

__all__ = ["StepLog", "StepValues"]


class StepLog:
    """What a run tells about its steps.

    sinks        where records go; empty on every rank but 0, which then reads nothing from the device
    peak_memory  bytes, the largest over ranks. Called on every rank at the same moments, so it may communicate: at each
                 flush that finds steps waiting, which are those of the log interval and those the owner asks for

    The owner flushes before a checkpoint is declared complete and at the end; `evaluation` flushes by itself.
    """

    def __init__(
        self, sinks: Sequence[Sink], rates: Rates, peak_memory: Callable[[], int], log_interval: int = 1
    ) -> None:
        self._sinks = tuple(sinks)
        self._rates = rates
        self._peak_memory = peak_memory
        self._interval = max(1, log_interval)
        self._waiting: list[StepValues] = []
        self._last_peak = 0

    def step(self, values: StepValues) -> None:
        """Take a step; at the log interval all that wait are written."""
        self._waiting.append(values)
        if values.iteration % self._interval == 0:
            self.flush()

    def flush(self, durable: bool = False) -> None:
        """Write every waiting step; `durable`: and see it on the disk, which a checkpoint needs."""
        steps, self._waiting = self._waiting, []
        if steps:
            self._last_peak = max(self._last_peak, self._peak_memory())
            self._write(steps, self._last_peak)
        for sink in self._sinks:
            sink.flush(durable)

    def evaluation(self, iteration: int, losses: Mapping[str, float]) -> None:
        """Write losses of an evaluation by metric name (`valid_loss`, `valid_loss/NAME`; `test_loss`), after the steps
        that wait.
        """
        self.flush()
        for sink in self._sinks:
            sink.evaluation(iteration, dict(losses))
            sink.flush(False)

    def note(self, text: str) -> None:
        """Say something to the person who reads along. Rank 0 is heard; communicates nothing."""
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        """Write what waits and close the sinks. Communicates nothing, so a failing rank may call it alone."""
        steps, self._waiting = self._waiting, []
        self._write(steps, self._last_peak)
        for sink in self._sinks:
            sink.close()

    def _write(self, steps: Sequence[StepValues], peak_memory: int) -> None:
        if not (self._sinks and steps):
            return
        began = time.perf_counter()
        table = [step.scalars() for step in steps]
        numbers = iter(read_scalars([value for row in table for value in row]))
        seconds = _seconds(steps, table, time.perf_counter() - began)
        for step, row, took in zip(steps, table, seconds, strict=True):
            record = resolve_step(step, [next(numbers) for _ in row], took, peak_memory, self._rates)
            for sink in self._sinks:
                sink.step(record)


def _seconds(steps: Sequence[StepValues], table: Sequence[Sequence[Scalar]], waited: float) -> list[float]:
    """Seconds of each step.

    A device that runs behind the host makes the host clock of a single step meaningless: the host queues steps in no
    time and waits when their numbers are read. Then the whole time is shared evenly between the steps. On the CPU
    the work is done when the call returns, and each step keeps its own.
    """
    behind = any(isinstance(value, Tensor) and value.device.type != "cpu" for row in table for value in row)
    if not behind:
        return [step.step_seconds for step in steps]
    mean = (sum(step.step_seconds for step in steps) + waited) / len(steps)
    return [mean] * len(steps)
