"""The end of a training step: what its list calls at NORM and UPDATE (`pipeline.actions.StepEnd`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.optim.clip import clip_coefficient
from megazero.program.instruction import Instruction
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.owed import UpdateValues

Reduce = Callable[..., list[Tensor]]
"""From values of this rank to their sums over all ranks, in one all-reduce."""


@dataclass
class TrainingStepEnd:
    """The end of one step; a `pipeline.actions.StepEnd`.

    optimizer  updates the parameters
    reduce     sums values over all ranks
    lr         learning rate of this step
    positions  number of token positions of the global batch
    scale      the loss scale, 0-dim
    clip_grad  the largest gradient norm
    tokens     number of unmasked tokens on this rank, 0 where it does not report the loss
    reports    whether this rank's loss enters the sum
    stops      whether this rank requests a stop; called when the gradients are there
    values     what updates take. Before `norm`: that of the step before if its updates are made in this one, else None

    After `norm`, the sums over all ranks: loss_sum, all_tokens, asked (requests to stop); and grad_norm before
    clipping, and bad: whether the step is skipped.
    """

    optimizer: ShardedOptimizer
    reduce: Reduce
    lr: float
    positions: int
    scale: Tensor
    clip_grad: float
    tokens: Tensor | float
    reports: bool
    stops: Callable[[], bool]
    values: UpdateValues | None = None
    loss_sum: Tensor = field(init=False)
    all_tokens: Tensor = field(init=False)
    asked: Tensor = field(init=False)
    grad_norm: Tensor = field(init=False)
    bad: Tensor = field(init=False)

    def norm(self, loss_sum: Tensor) -> None:
        """Sum over all ranks what decides the update. A collective of the world: one all-reduce of four float64."""
        self.optimizer.complete_reduction()  # sums of squares are of reduced gradients
        squares, self.loss_sum, self.all_tokens, self.asked = self.reduce(
            self.optimizer.sum_of_squares(), loss_sum if self.reports else 0.0, self.tokens, float(self.stops())
        )
        unscale = self.positions / (self.all_tokens * self.scale)
        self.grad_norm = squares.sqrt() * unscale
        # Of the sums, so that all ranks decide alike. A loss may be finite where gradients are not, and the other way.
        self.bad = ~(torch.isfinite(self.grad_norm) & torch.isfinite(self.loss_sum))
        multiplier = unscale * clip_coefficient(self.grad_norm, self.clip_grad)
        self.values = UpdateValues(self.lr, multiplier, self.bad, self.optimizer.step_count + 1.0)

    def update(self, buckets: Sequence[int], part: int) -> None:
        """Update the ranges of these buckets that this rank owns, or a part of one."""
        assert self.values is not None, "an update before the norm, and none is owed"
        self.optimizer.update(buckets, self.values, part)

    def update_host(self, i: Instruction) -> None:
        """Start to update a part of a bucket in host memory."""
        assert self.values is not None, "an update before the norm, and none is owed"
        self.optimizer.update_host(i, self.values)


@dataclass(frozen=True)
class OwedStepEnd:
    """The updates of a step that is over; a `pipeline.actions.StepEnd` of a list that has no others."""

    optimizer: ShardedOptimizer
    values: UpdateValues

    def norm(self, loss_sum: Tensor) -> None:
        raise AssertionError("a list of updates alone has no norm")

    def update(self, buckets: Sequence[int], part: int) -> None:
        """Update the ranges of these buckets that this rank owns, or a part of one."""
        self.optimizer.update(buckets, self.values, part)

    def update_host(self, i: Instruction) -> None:
        """Start to update a part of a bucket in host memory."""
        self.optimizer.update_host(i, self.values)
