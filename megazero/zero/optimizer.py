"""The optimizer over the ranges that this rank updates, and their fragments for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops import apex
from fused_ops.adam import AdamRange, adam_steps, sgd_step
from fused_ops.norm import sum_of_squares
from megazero.config.schema import OptimizerConfig
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.zero.fragment import Fragment
from megazero.zero.placement import Column
from megazero.zero.state import ModelState

ADAM = {"megazero": adam_steps, "apex": apex.adam_steps}
"""Adam by --optimizer-impl."""


@dataclass(frozen=True)
class UpdateValues:
    """What all updates of a step share.

    lr          learning rate of this step
    multiplier  0-dim on the device: clip coefficient / loss scale
    skip        0-dim bool on the device, the same on all ranks: weights, moments and step count keep their bits
    """

    lr: float
    multiplier: Tensor
    skip: Tensor


class ShardedOptimizer:
    """AdamW, Adam or SGD on flat ranges: this rank's shards (from ZeRO-1 on), or whole buckets on every rank (ZeRO-0).

    (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.) The end of a step is `complete_reduction`, `sum_of_squares`
    (which the caller sums over all ranks), `update` for each bucket once, `end_step`. None of them waits for the
    device.

    step_count  0-dim float64 tensor on the device: number of steps that were not skipped
    """

    def __init__(self, state: ModelState, cfg: OptimizerConfig, grid: ProcessGrid) -> None:
        self.state, self.cfg, self.grid = state, cfg, grid
        self.step_count = torch.zeros((), dtype=torch.float64, device=grid.device)
        self._counted = [view for index in range(len(state.buckets)) for view in self._gradients(index, counted=True)]
        self._replicas = [view for index in range(len(state.buckets)) for view in self._gradients(index, counted=False)]

    def complete_reduction(self) -> None:
        """Wait until the reductions that the step's list has launched are complete."""
        self.state.reducer.complete()

    def sum_of_squares(self) -> Tensor:
        """This rank's part of the squared norm of the reduced gradients, 0-dim float64. Communicates nothing.

        Summed over all ranks of the world, the parts are the squared norm of the whole model's gradient. Each element
        counts once: the owner of a range counts it, and parameters replicated over tp count on tp rank 0. A tied
        embedding is owned once within the groups of both its stages. Padding does not count. The other tp ranks add NaN
        if their replica of a gradient is not finite, so that a fault on one tp rank makes all ranks skip the step.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for view in self._counted:
            total += sum_of_squares(view)
        for view in self._replicas:
            total += 0.0 * sum_of_squares(view)
        return total

    def update(self, indices: Sequence[int], now: UpdateValues) -> None:
        """Update the ranges of these buckets that this rank owns, with the gradients times `now.multiplier`.

        Communicates nothing: the gathers of parameters that are kept whole are instructions of their own.
        """
        self.state.gatherer.ready(indices)
        self._update([own for index in indices for own in self._ranges(index)], now, self.step_count + 1.0)

    def end_step(self, skip: Tensor) -> None:
        """Count the step unless it was skipped, and reset the gradients. skip: as in `UpdateValues`."""
        self.step_count = torch.where(skip, self.step_count, self.step_count + 1.0)
        self.state.messages.end_step(skip)
        self.state.reducer.reset()

    def fragments(self) -> Iterator[Fragment]:
        """The fragments that this rank owns, at any ZeRO stage. `layout.owned_fragments` lists them for any rank.

        Every tp rank owns the parameters that are replicated over tp: a save needs one of them, a load must fill each.
        To load, write into the tensors, set `step_count`, and call `after_load`.
        """
        self.state.wait_parameters()
        table, weights = self.state.columns, self.state.weights
        for index, bucket in enumerate(self.state.buckets):
            for fragment in bucket.layout.fragments(*bucket.owned):
                at = index, fragment.offset, fragment.offset + fragment.numel
                second = table[Column.EXP_AVG_SQ].view(*at) if Column.EXP_AVG_SQ in table else None
                yield Fragment(
                    fragment.spec,
                    fragment.start,
                    fragment.stop,
                    weights.view(*at),
                    table[Column.EXP_AVG].view(*at),
                    second,
                )

    @torch.no_grad()
    def after_load(self) -> None:
        """Update parameters and the other ranks' copies from the owners' fragments, which a load has filled.

        Communicates per bucket: an all-gather of every optimizer column over the ranks that store the same shard, and
        then over the neighbours of that of every column that is whole (ZeRO-0), or of the parameters (the other
        stages).
        """
        table, weights = self.state.columns, self.state.weights
        for index, bucket in enumerate(self.state.buckets):
            for column in (weights, table[Column.EXP_AVG], table.get(Column.EXP_AVG_SQ)):
                if column is not None:
                    collectives.all_gather(column.shard(index), column.owned(index), bucket.groups.across).wait()
                    if not column.is_sharded_in(index):
                        collectives.all_gather(column.held(index), column.shard(index), bucket.groups.inner).wait()
            if self.state.has_master:
                start, stop = weights.range_of(index)
                table[Column.PARAMETER].view(index, start, stop).copy_(weights.held(index))
                if weights.is_sharded and not table[Column.PARAMETER].is_sharded_in(index):
                    self.state.gatherer.gather(index)
        self.state.wait_parameters()

    def _gradients(self, index: int, *, counted: bool) -> list[Tensor]:
        """Views of this rank's own gradients that count in the norm here (or do not). Adjacent ones are merged."""
        bucket = self.state.buckets[index]
        runs: list[tuple[int, int]] = []
        for fragment in bucket.layout.fragments(*bucket.owned):
            if counted == (fragment.spec.tp_sharded or self.grid.at.tp == 0):
                stop = fragment.offset + fragment.numel
                if runs and runs[-1][1] == fragment.offset:
                    runs[-1] = runs[-1][0], stop
                else:
                    runs.append((fragment.offset, stop))
        return [self.state.columns[Column.GRADIENT].view(index, *run) for run in runs]

    def _decay_ranges(self, index: int) -> Iterator[tuple[int, int, float]]:
        """The ranges of a bucket that this rank updates, as (start, stop, weight decay): two at most."""
        layout = self.state.buckets[index].layout
        first, last = self.state.columns[Column.EXP_AVG].range_of(index)
        for start, stop, decay in ((0, layout.decayed, self.cfg.weight_decay), (layout.decayed, layout.used, 0.0)):
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop), decay

    def _ranges(self, index: int) -> Iterator[AdamRange]:
        """The tensors of these ranges. SGD has no second moment; the first stands in its place."""
        table = self.state.columns
        second = table.get(Column.EXP_AVG_SQ, table[Column.EXP_AVG])
        for start, stop, decay in self._decay_ranges(index):
            at = index, start, stop
            yield AdamRange(
                table[Column.PARAMETER].view(*at) if self.state.has_master else None,
                self.state.weights.view(*at),
                table[Column.GRADIENT].view(*at),
                table[Column.EXP_AVG].view(*at),
                second.view(*at),
                decay,
            )

    def _update(self, ranges: Sequence[AdamRange], now: UpdateValues, number: Tensor) -> None:
        cfg = self.cfg
        if cfg.optimizer == "sgd":
            for own in ranges:
                sgd_step(
                    *own[:4],
                    lr=now.lr,
                    momentum=cfg.sgd_momentum,
                    weight_decay=own.weight_decay,
                    multiplier=now.multiplier,
                    skip=now.skip,
                )
            return
        ADAM[cfg.optimizer_impl](
            ranges,
            lr=now.lr,
            beta1=cfg.adam_beta1,
            beta2=cfg.adam_beta2,
            eps=cfg.adam_eps,
            decoupled=cfg.optimizer == "adamw",
            step=number,
            multiplier=now.multiplier,
            skip=now.skip,
        )
