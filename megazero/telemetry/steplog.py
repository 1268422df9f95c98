"""A queue of steps whose metrics are on the device. At the log interval one transfer reads them for the sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megazero.telemetry.record import (
    FINISHED,
    Ending,
    EndingSink,
    Rates,
    Scalar,
    Sink,
    StepValues,
    read_scalars,
    resolve_step,
)

__all__ = ["StepLog", "StepValues"]


class StepLog:
    """Passes the metrics of a run's steps to its sinks.

    sinks         the sinks; empty on all ranks but 0, which then read nothing from the device
    peak_memory   returns bytes, the largest over ranks. All ranks call it at the same points, so it may communicate: in
                  each `flush` with waiting steps
    log_interval  steps between two flushes

    The caller flushes before a checkpoint becomes complete and at the end of the run. `evaluation` flushes by itself.
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
        self._closed = False

    def step(self, values: StepValues) -> None:
        """Queue a step. At the log interval all queued steps are written."""
        self._waiting.append(values)
        if values.iteration % self._interval == 0:
            self.flush()

    def flush(self, durable: bool = False) -> None:
        """Write all queued steps. durable: to the disk, as a checkpoint needs. All ranks call this."""
        steps, self._waiting = self._waiting, []
        if steps:
            self._last_peak = max(self._last_peak, self._peak_memory())
            self._write(steps, self._last_peak)
        for sink in self._sinks:
            sink.flush(durable)

    def evaluation(self, iteration: int, losses: Mapping[str, float]) -> None:
        """Write the losses of an evaluation by metric name, after all queued steps. All ranks call this."""
        self.flush()
        for sink in self._sinks:
            sink.evaluation(iteration, dict(losses))
            sink.flush(False)

    def note(self, text: str) -> None:
        """Pass a remark for the user to the sinks, which only rank 0 has. Communicates nothing."""
        for sink in self._sinks:
            sink.note(text)

    def close(self, ending: Ending = FINISHED) -> None:
        """Write all queued steps, tell sinks how the run ends, and close them. Communicates nothing."""
        steps, self._waiting = self._waiting, []
        self._write(steps, self._last_peak)
        self._closed = True
        for sink in self._sinks:
            if isinstance(sink, EndingSink):
                sink.ended(ending)
            sink.close()

    def abandon(self) -> None:
        """Unless the log is closed: tell the sinks that hear of a run's end that this run has failed. A failing rank
        calls this alone. Steps that are queued stay unread, since after an error the device may never answer.
        """
        if not self._closed:
            self._closed = True
            for sink in self._sinks:
                if isinstance(sink, EndingSink):
                    sink.ended(Ending("failed"))
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

    With an asynchronous device the host's time of one step means nothing: the host launches steps ahead and waits when
    their metrics are read. The whole time is then divided equally among the steps. On the CPU each step keeps its own.
    """
    behind = any(isinstance(value, Tensor) and value.device.type != "cpu" for row in table for value in row)
    if not behind:
        return [step.step_seconds for step in steps]
    mean = (sum(step.step_seconds for step in steps) + waited) / len(steps)
    return [mean] * len(steps)
