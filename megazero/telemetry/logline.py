"""One aligned line per step, the same in a terminal and in a file: no carriage returns, no colours."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TextIO

from megazero.telemetry.record import StepRecord
from megazero.telemetry.units import count, duration, size


@dataclass(frozen=True)
class LogColumn:
    """A column of the log: its heading and its width in characters."""

    heading: str
    width: int


def columns(total_iterations: int, fp16: bool, of_samples: bool = False) -> tuple[LogColumn, ...]:
    """The columns of a run's log: 93 to 120 characters in all, gaps included. fp16: with the loss scale. of_samples:
    without FLOPs, and with samples in place of tokens.
    """
    digits = len(str(total_iterations))
    listed = [
        LogColumn("iteration", max(9, 2 * digits + 1)),
        LogColumn("loss", 8),
        LogColumn("grad norm", 9),
        LogColumn("lr", 9),
        LogColumn("loss scale", 10),
        LogColumn("samples/s", 9) if of_samples else LogColumn("tokens/s", 8),
        LogColumn("TFLOP/s", 7),
        LogColumn("s/step", 7),
        LogColumn("memory", 8),
        LogColumn("left", 12),
    ]
    left_out = ("" if fp16 else "loss scale", "TFLOP/s" if of_samples else "")
    return tuple(column for column in listed if column.heading not in left_out)


def header(shown: tuple[LogColumn, ...]) -> str:
    """The line of headings."""
    return "  ".join(column.heading.rjust(column.width) for column in shown).rstrip()


def _number(value: float, digits: int) -> str:
    """Fixed-point if it fits, else scientific; at most 9 characters."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == 0 or 10**-digits <= abs(value) < 10 ** (8 - digits):
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def _teraflops(value: float) -> str:
    """A rate with enough digits for a laptop's rank and for an H100's."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def line(record: StepRecord, total_iterations: int, shown: tuple[LogColumn, ...], seconds_left: float) -> str:
    """The line of a step, with "skipped" or "updated again" at its end where that is so. seconds_left: time to the end
    of the run.
    """
    digits = len(str(total_iterations))
    cells = {
        "iteration": f"{record.iteration:>{digits}}/{total_iterations}",
        "loss": _number(record.loss, 4),
        "grad norm": _number(record.grad_norm, 3),
        "lr": f"{record.lr:.3e}",
        "loss scale": f"{record.loss_scale:.5g}",
        "tokens/s": count(record.tokens_per_second),
        "samples/s": count(record.tokens_per_second),
        "TFLOP/s": _teraflops(record.model_tflops_per_rank),
        "s/step": f"{record.step_seconds:.3f}" if record.step_seconds < 1000 else f"{record.step_seconds:.0f}",
        "memory": size(record.peak_memory_bytes),
        "left": duration(seconds_left),
    }
    text = "  ".join(cells[column.heading].rjust(column.width) for column in shown)
    return text + "  skipped" * record.skipped + "  updated again" * bool(record.updated_again)


class LogLines:
    """Prints every `interval`-th step and the last one. A `Sink`; rank 0 only.

    total_iterations     last iteration of the run
    header_every         lines between two headers
    stream               where to print; default: stdout at the time of printing
    seconds_to_deadline  of a run with a time limit; it caps the time left

    The time left is computed with an exponential mean of step times (the last step weighs a tenth).
    """

    def __init__(
        self,
        total_iterations: int,
        *,
        fp16: bool = False,
        interval: int = 1,
        header_every: int = 40,
        stream: TextIO | None = None,
        seconds_to_deadline: float | None = None,
        of_samples: bool = False,
    ) -> None:
        self._total = total_iterations
        self._columns = columns(total_iterations, fp16, of_samples)
        self._interval = max(1, interval)
        self._header_every = header_every
        self._stream = stream
        self._printed = 0
        self._mean: float | None = None
        self._budget = seconds_to_deadline

    def step(self, record: StepRecord) -> None:
        # The first step is slow, since it also warms up: its time is replaced by the second step's.
        first = self._mean is None or record.iteration <= 2
        self._mean = record.step_seconds if first else 0.9 * (self._mean or 0.0) + 0.1 * record.step_seconds
        if self._budget is not None:
            self._budget = max(0.0, self._budget - record.step_seconds)
        if record.iteration % self._interval and record.iteration != self._total:
            return
        left = max(0, self._total - record.iteration) * self._mean
        if self._budget is not None:
            left = min(left, self._budget)
        if self._printed % self._header_every == 0:
            self._print(header(self._columns))
        self._printed += 1
        self._print(line(record, self._total, self._columns, left))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        shown = "   ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        what = "test" if "test_loss" in losses else "validation"
        self._print(f"{what} after iteration {iteration}:   {shown}")

    def note(self, text: str) -> None:
        self._print(text)

    def flush(self, durable: bool) -> None:
        (self._stream or sys.stdout).flush()

    def close(self) -> None:
        self.flush(False)

    def _print(self, text: str) -> None:
        # One write per line, so that other processes' output cannot split it.
        stream = self._stream or sys.stdout
        stream.write(text + "\n")
        stream.flush()
