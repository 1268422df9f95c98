"""The metrics of one step: as tensors that may be on the device, and as numbers.

The fields of `StepRecord` are the keys of the metrics file, in its order. Other programs rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from megazero.telemetry.units import teraflops_per_rank

Scalar = float | int | bool | Tensor
"""A number, or a 0-dim tensor on any device."""


@dataclass(frozen=True)
class StepValues:
    """A step whose tensors have not been read yet.

    iteration           number of the step, from 1
    consumed_samples    of the run, after the step
    consumed_tokens     of the run, after the step
    loss                mean over the counted tokens of the global batch
    grad_norm           before clipping, without the loss scale
    lr                  learning rate used in the step
    loss_scale          used in the step
    skipped             whether the weights did not change (overflow)
    global_batch_size   samples of the step
    step_seconds        seconds on the host's clock; with an asynchronous device, the time to launch the step
    updated_again       whether early updates were made again (--early-update); None: the step had none
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: Scalar
    grad_norm: Scalar
    lr: float
    loss_scale: Scalar
    skipped: Scalar
    global_batch_size: int
    step_seconds: float
    updated_again: bool | None = None

    def scalars(self) -> tuple[Scalar, ...]:
        """The values that may be on the device, in the order in which `resolve_step` takes them."""
        return self.loss, self.grad_norm, self.loss_scale, self.skipped


@dataclass(frozen=True)
class StepRecord:
    """The metrics of a step as numbers. Fields that are not described here are those of `StepValues`.

    step_seconds              seconds of the step on the device
    model_tflops_per_rank     model FLOPs, without recomputation, in TFLOP/s
    hardware_tflops_per_rank  TFLOP/s with recomputation; None without recomputation
    peak_memory_bytes         largest over all ranks so far
    mfu                       model FLOPs utilisation, 0 to 1; None where the device's peak is not known
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    global_batch_size: int
    step_seconds: float
    tokens_per_second: float
    model_tflops_per_rank: float
    peak_memory_bytes: int
    hardware_tflops_per_rank: float | None = None
    mfu: float | None = None
    updated_again: bool | None = None

    def as_json(self) -> dict[str, float | int | bool | None]:
        """The object of the metrics file. Numbers that are not finite become None; fields that are None are omitted."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: finite(value) for key, value in pairs.items() if value is not None}


def finite(value: float | int | bool) -> float | int | bool | None:
    """The value, or None for NaN and infinities, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Rates:
    """The constants of a run by which seconds become rates.

    flops_per_sample       model FLOPs of forward and backward of one sample
    sequence               tokens of a sample
    ranks                  world size
    peak_flops             peak FLOP/s of one rank's device, or of its part of a shared one; None if not known
    recomputed_per_sample  FLOPs that recomputation adds per sample
    """

    flops_per_sample: float
    sequence: int
    ranks: int
    peak_flops: float | None = None
    recomputed_per_sample: float = 0.0


class NoSink(ValueError):
    """A sink that cannot be made: what a package makes of its name is none, or a service cannot be used."""


@dataclass(frozen=True)
class Ending:
    """How a run ends.

    state   finished; stopped as asked; or failed
    reason  of a run that stopped: a signal or a flag
    """

    state: Literal["finished", "stopped", "failed"]
    reason: str = ""

    def words(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


FINISHED = Ending("finished")


@runtime_checkable
class EndingSink(Protocol):
    """A `Sink` that is told how the run ends. One that is closed without a word has a run that failed."""

    def ended(self, ending: Ending) -> None:
        """Take how the run ends. Called once, before `close`."""

    def close(self) -> None:
        """As of a `Sink`."""


class Sink(Protocol):
    """A destination of metrics. Called on rank 0 only."""

    def note(self, text: str) -> None:
        """Take a remark for the user. Files for programs leave it out."""

    def step(self, record: StepRecord) -> None:
        """Take the record of a step. Called in the order of steps."""

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        """Take the losses of an evaluation by metric name: valid_loss, valid_loss/NAME; test_loss."""

    def flush(self, durable: bool) -> None:
        """Write what is buffered to the system; with `durable`, to the disk."""

    def close(self) -> None:
        """Write what is left and close. Nothing is called afterwards."""


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """The values as Python floats. One transfer from the device reads all tensors among them."""
    tensors = [value.detach().to(torch.float64) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def resolve_step(
    step: StepValues, numbers: Sequence[float], seconds: float, peak_memory: int, rates: Rates
) -> StepRecord:
    """The record of a step. numbers: its `scalars()` as numbers; seconds: time of the step; peak_memory: bytes."""
    loss, grad_norm, loss_scale, skipped = numbers
    tokens = step.global_batch_size * rates.sequence
    seconds = max(seconds, 1e-9)
    per_rank = teraflops_per_rank(step.global_batch_size * rates.flops_per_sample, seconds, rates.ranks)
    again = teraflops_per_rank(step.global_batch_size * rates.recomputed_per_sample, seconds, rates.ranks)
    return StepRecord(
        iteration=step.iteration,
        consumed_samples=step.consumed_samples,
        consumed_tokens=step.consumed_tokens,
        loss=loss,
        grad_norm=grad_norm,
        lr=step.lr,
        loss_scale=loss_scale,
        skipped=bool(skipped),
        global_batch_size=step.global_batch_size,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        model_tflops_per_rank=per_rank,
        peak_memory_bytes=peak_memory,
        hardware_tflops_per_rank=per_rank + again if again else None,
        mfu=None if rates.peak_flops is None else per_rank * 1e12 / rates.peak_flops,
        updated_again=step.updated_again,
    )
