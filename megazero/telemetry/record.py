"""One step's numbers: while they may still lie on the device, and once they are known.

The keys of `StepRecord` are those of the metrics file, in its order; other programs rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from megazero.telemetry.units import teraflops_per_rank

Scalar = float | int | bool | Tensor
"""A number, or a 0-dim tensor that holds it on the device."""


@dataclass(frozen=True)
class StepValues:
    """A step whose tensors have not been read yet.

    loss                mean over the valid tokens of the global batch
    grad_norm           before clipping, without the loss scale
    lr                  used in the step
    skipped             whether the step changed nothing (overflow)
    consumed_*          after the step
    step_seconds        host clock; on a device that runs behind the host it is the time to queue the step
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

    def scalars(self) -> tuple[Scalar, ...]:
        """What may still lie on the device, in the order in which `resolve_step` takes it back."""
        return self.loss, self.grad_norm, self.loss_scale, self.skipped


@dataclass(frozen=True)
class StepRecord:
    """A step as it is written down.

    hardware_tflops_per_rank  with what is computed a second time; None where nothing is
    mfu                       None where the device's peak is not known
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

    def as_json(self) -> dict[str, float | int | bool | None]:
        """The object of the metrics file: non-finite numbers are None, and what is None is left out."""
        pairs = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: finite(value) for key, value in pairs.items() if value is not None}


def finite(value: float | int | bool) -> float | int | bool | None:
    """The value, or None for NaN and infinities, which JSON does not know."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Rates:
    """What turns seconds into rates.

    flops_per_sample       model FLOPs of one sample's training step
    sequence               tokens of a sample
    ranks                  world size
    peak_flops             of one rank's share of its device, or None
    recomputed_per_sample  FLOPs that recompute adds to a sample's
    """

    flops_per_sample: float
    sequence: int
    ranks: int
    peak_flops: float | None = None
    recomputed_per_sample: float = 0.0


class Sink(Protocol):
    """Where records go. Called on rank 0 only."""

    def note(self, text: str) -> None:
        """A remark to whoever reads along; files for programs leave it out."""

    def step(self, record: StepRecord) -> None:
        """A step is known."""

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        """`losses` by metric name: valid_loss, valid_loss/NAME; test_loss."""

    def flush(self, durable: bool) -> None:
        """Hand what is buffered to the system; `durable`: to the disk."""

    def close(self) -> None:
        """Nothing more will come."""


def read_scalars(values: Sequence[Scalar]) -> list[float]:
    """The values as Python numbers, with one transfer from the device for all tensors among them."""
    tensors = [value.detach().to(torch.float64) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


def resolve_step(
    step: StepValues, numbers: Sequence[float], seconds: float, peak_memory: int, rates: Rates
) -> StepRecord:
    """The record of a step whose scalars have been read; `seconds` is what the step took."""
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
    )
