"""Cross-entropy of logits whose vocabulary is split over tp (Shoeybi et al. 2019, arXiv:1909.08053).

N tokens, v padded vocabulary, t = tp size; rank r holds columns [r*v/t, (r+1)*v/t). Backward writes the gradient over
the logits, so that there is no second tensor of their size. The head's product does not need its own output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype, rows_of
from fused_ops.cross_entropy import row_statistics, write_gradient
from fused_ops.soft_cap import SoftCap
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import Group


class LossRows(NamedTuple):
    """The losses of N rows of logits, and what their gradient needs.

    losses          [N], fp32 for 16-bit logits, else of the logits' dtype
    target          int64 [N]: the label's column on this rank, -1 where another rank holds it
    log_normaliser  [N]: log of the sum of exp over the whole vocabulary, of the dtype of `losses`
    """

    losses: Tensor
    target: Tensor
    log_normaliser: Tensor


@dataclass(frozen=True)
class VocabularyLoss:
    """Cross-entropy over a vocabulary that is split over `group`, computed for any number of rows at a time.

    vocab            number of real columns; all further columns of the logits are padding
    label_smoothing  e of `vocab_parallel_cross_entropy`
    z_loss           z of `vocab_parallel_cross_entropy`
    multiplier, cap  of the logits before the loss (`fused_ops.soft_cap`)
    """

    group: Group
    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    multiplier: float = 1.0
    cap: float | None = None

    def of(self, logits: Tensor, labels: Tensor) -> LossRows:
        """Losses of rows of logits [N, v/t] with labels int64 [N], replicated.

        Communicates: an all-reduce of N maxima and one of 2N sums (3N with label smoothing).
        """
        real, start = self._columns(logits)
        target = labels - start
        target = target.masked_fill((target < 0) | (target >= real), -1)
        largest, sums = self._statistics(logits, target, real)
        if self.group.size > 1:
            own = largest.clone()
            all_reduce(largest, self.group, "max").wait()
            sums[0] *= torch.where(own == -torch.inf, 0.0, (own - largest).exp())
            all_reduce(sums, self.group).wait()
        log_normaliser = sums[0].log().add_(largest)
        losses = log_normaliser - (1.0 - self.label_smoothing) * sums[1]
        if self.label_smoothing:
            losses -= (self.label_smoothing / self.vocab) * sums[2]
        if self.z_loss:
            losses += self.z_loss * log_normaliser.square()
        return LossRows(losses, target, log_normaliser)

    def write_gradient(self, logits: Tensor, rows: LossRows, grad: Tensor) -> None:
        """Overwrite the logits [N, v/t] with their gradient. grad [N]: the gradient of the losses."""
        real, _ = self._columns(logits)
        weight = grad * (1.0 + 2.0 * self.z_loss * rows.log_normaliser) if self.z_loss else grad
        hit = grad * (self.label_smoothing - 1.0)
        smooth = (self.label_smoothing / self.vocab) * grad if self.label_smoothing else None
        if not self._soft_cap.changes:
            write_gradient(logits, rows.target, real, rows.log_normaliser, weight, hit, smooth)
            return
        numbers = rows.log_normaliser, weight, hit
        with torch.no_grad():
            for row, capped in self._capped_blocks(logits, real):
                slope = self._soft_cap.slope(capped)
                smoothed = None if smooth is None else smooth[row]
                normaliser, of_row, at_label = (number[row] for number in numbers)
                write_gradient(capped, rows.target[row], real, normaliser, of_row, at_label, smoothed)
                logits[row, :real] = capped.mul_(slope)
            logits[:, real:] = 0

    def _statistics(self, logits: Tensor, target: Tensor, real: int) -> tuple[Tensor, Tensor]:
        """`row_statistics` of the logits behind the multiplier and the cap."""
        summed = bool(self.label_smoothing)
        if not self._soft_cap.changes:
            return row_statistics(logits, target, real, summed=summed)
        largest = logits.new_empty(logits.shape[0], dtype=opmath_dtype(logits.dtype))
        sums = largest.new_empty((3 if summed else 2, logits.shape[0]))
        for row, capped in self._capped_blocks(logits, real):
            largest[row], sums[:, row] = row_statistics(capped, target[row], real, summed=summed)
        return largest, sums

    def _capped_blocks(self, logits: Tensor, real: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their real logits behind the multiplier and the cap, in the dtype of the computation.

        There is a block of these at a time. In the logits' place, in 16 bits, they would round twice, and the slope
        of the cap would be lost where it is flat.
        """
        count = rows_of(logits, logits.shape[1])
        for row in (slice(start, start + count) for start in range(0, logits.shape[0], count)):
            yield row, self._soft_cap.of(logits[row, :real])

    @property
    def _soft_cap(self) -> SoftCap:
        return SoftCap(self.multiplier, self.cap)

    def _columns(self, logits: Tensor) -> tuple[int, int]:
        """(number of this rank's columns that are not padding, vocabulary id of its first column)."""
        width = logits.shape[1]
        start = self.group.index * width
        return min(max(self.vocab - start, 0), width), start


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: VocabularyLoss) -> Tensor:
        rows = loss.of(logits, labels)
        ctx.save_for_backward(logits, *rows)
        ctx.loss = loss
        return rows.losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, *rows = ctx.saved_tensors
        ctx.loss.write_gradient(logits, LossRows(*rows), grads[0])
        return logits, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    multiplier: float = 1.0,
    cap: float | None = None,
) -> Tensor:
    """Loss of each token [N], replicated; fp32 for 16-bit logits, else of the logits' dtype.

    logits [N, v/t], labels int64 [N] in [0, vocab). Columns from `vocab` on are padding: they are left out of the sums
    and get a zero gradient. With e = label_smoothing, z = z_loss, Z = sum over the real vocabulary of exp(x):
    loss = (1-e)(log Z - x_label) + e * mean over the real vocabulary of (log Z - x) + z (log Z)^2
    where x are the logits behind the multiplier and the cap of `fused_ops.soft_cap`
    (label smoothing: Szegedy et al. 2015, arXiv:1512.00567; z-loss: Chowdhery et al. 2022, arXiv:2204.02311).

    Communicates in forward: an all-reduce of N maxima and one of 2N sums (3N with label smoothing). In backward:
    nothing. Backward overwrites the logits. Nothing may read them afterwards, and backward runs once per graph.
    """
    assert logits.dim() == 2 and labels.shape == logits.shape[:1] and logits.shape[1] * group.size >= vocab
    result: Tensor = _CrossEntropy.apply(
        logits, labels, VocabularyLoss(group, vocab, label_smoothing, z_loss, multiplier, cap)
    )
    return result
