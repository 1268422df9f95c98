"""The optimizer over the ranges that this rank updates, and what a checkpoint sees of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_ops import apex
from fused_ops.adam import adam_step, sgd_step
from fused_ops.norm import sum_of_squares
from megazero.config.schema import OptimizerConfig
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.zero.fragment import Fragment
from megazero.zero.placement import Column
from megazero.zero.state import ModelState

ADAM = {"megazero": adam_step, "apex": apex.adam_step}
"""By --optimizer-impl."""


class ShardedOptimizer:
    """AdamW, Adam or SGD on flat ranges: this rank's shards (ZeRO-1, 2), or whole buckets on every rank (ZeRO-0).

    A step is `finish_reduction`, `sum_of_squares` (to be summed over all ranks), `step`. Nothing in them reads a value
    back from the device.

    step_count  0-dim float64 tensor on the device: steps that were not skipped
    """

    def __init__(self, state: ModelState, cfg: OptimizerConfig, grid: ProcessGrid) -> None:
        self.state, self.cfg, self.grid = state, cfg, grid
        self.step_count = torch.zeros((), dtype=torch.float64, device=grid.device)
        self._counted = [view for index in range(len(state.buckets)) for view in self._gradients(index, counted=True)]
        self._replicas = [view for index in range(len(state.buckets)) for view in self._gradients(index, counted=False)]

    def finish_reduction(self) -> None:
        """Wait until the gradients of the step are summed over dp (and tied stages, and tp where they are partial)."""
        self.state.reducer.finish()

    def sum_of_squares(self) -> Tensor:
        """This rank's share of the squared norm of the summed gradients, 0-dim float64; communicates nothing.

        Over all ranks of the world the shares add up to the squared norm of the global model's gradient, each element
        counted once: the owner of a range counts it, parameters replicated over tp count on tp rank 0, a tied embedding
        is owned once by the group of both its stages, padding is left out. A replica that does not count makes the sum
        NaN where it is not finite: a fault on one tp rank must not be applied there and nowhere else.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for view in self._counted:
            total += sum_of_squares(view)
        for view in self._replicas:
            total += 0.0 * sum_of_squares(view)
        return total

    def step(self, lr: float, multiplier: Tensor, skip: Tensor) -> None:
        """Update the weights with the gradients times `multiplier`, start gathering them, and forget the gradients.

        multiplier  0-dim: clipping times unscaling
        skip        0-dim bool, the same on all ranks: weights, moments and the step count stay as they are, bit by bit

        Communicates (ZeRO-1, 2): one all-gather per bucket over its group, awaited by the next forward.
        """
        self.state.wait_parameters()
        number = self.step_count + 1.0
        for index in range(len(self.state.buckets)):
            for start, stop, decay in self._decay_ranges(index):
                self._update(index, start, stop, decay, lr, number, multiplier, skip)
            self.state.gatherer.launch(index)
        self.state.gatherer.launched_all()
        self.step_count = torch.where(skip, self.step_count, number)
        self.state.reducer.reset()

    def fragments(self) -> Iterator[Fragment]:
        """What this rank owns, whatever the ZeRO stage. `layout.owned_fragments` gives the same list for any rank,
        without values.

        Parameters replicated over tp come on every tp rank; one of them is enough to write, each is needed to load.
        To load, write into the tensors, set `step_count`, and call `after_load`.
        """
        self.state.wait_parameters()
        table, weights = self.state.columns, self.state.weights
        for index, bucket in enumerate(self.state.buckets):
            for fragment in bucket.layout.fragments(*bucket.shard):
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
        """Make parameters and replicated columns those of the owners, whose fragments have been filled.

        Communicates per bucket over its group: an all-gather of the parameters, under ZeRO-0 of every optimizer column.
        """
        table, weights = self.state.columns, self.state.weights
        for index, bucket in enumerate(self.state.buckets):
            for column in (weights, table[Column.EXP_AVG], table.get(Column.EXP_AVG_SQ)):
                if column is not None and not column.is_sharded:
                    collectives.all_gather(column.held(index), column.shard(index), bucket.group).wait()
            if self.state.has_master:
                start, stop = weights.range_of(index)
                table[Column.PARAMETER].view(index, start, stop).copy_(weights.held(index))
                self.state.gatherer.launch(index)
        self.state.wait_parameters()

    def _gradients(self, index: int, *, counted: bool) -> list[Tensor]:
        """Parts of this rank's shard of the gradient that count in the norm here, or that do not; neighbours are one
        view.
        """
        bucket = self.state.buckets[index]
        runs: list[tuple[int, int]] = []
        for fragment in bucket.layout.fragments(*bucket.shard):
            if counted == (fragment.spec.tp_sharded or self.grid.at.tp == 0):
                stop = fragment.offset + fragment.numel
                if runs and runs[-1][1] == fragment.offset:
                    runs[-1] = runs[-1][0], stop
                else:
                    runs.append((fragment.offset, stop))
        return [self.state.columns[Column.GRADIENT].view(index, *run) for run in runs]

    def _decay_ranges(self, index: int) -> Iterator[tuple[int, int, float]]:
        """What this rank updates of a bucket, as (start, stop, weight decay): at most two ranges, the unused tail left
        out.
        """
        layout = self.state.buckets[index].layout
        first, last = self.state.columns[Column.EXP_AVG].range_of(index)
        for start, stop, decay in ((0, layout.decayed, self.cfg.weight_decay), (layout.decayed, layout.used, 0.0)):
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop), decay

    def _update(
        self,
        index: int,
        start: int,
        stop: int,
        decay: float,
        lr: float,
        number: Tensor,
        multiplier: Tensor,
        skip: Tensor,
    ) -> None:
        cfg, table = self.cfg, self.state.columns
        rounded = table[Column.PARAMETER].view(index, start, stop) if self.state.has_master else None
        weights, gradient = self.state.weights.view(index, start, stop), table[Column.GRADIENT].view(index, start, stop)
        first = table[Column.EXP_AVG].view(index, start, stop)
        if cfg.optimizer == "sgd":
            sgd_step(
                rounded,
                weights,
                gradient,
                first,
                lr=lr,
                momentum=cfg.sgd_momentum,
                weight_decay=decay,
                multiplier=multiplier,
                skip=skip,
            )
            return
        ADAM[cfg.optimizer_impl](
            rounded,
            weights,
            gradient,
            first,
            table[Column.EXP_AVG_SQ].view(index, start, stop),
            lr=lr,
            beta1=cfg.adam_beta1,
            beta2=cfg.adam_beta2,
            eps=cfg.adam_eps,
            weight_decay=decay,
            decoupled=cfg.optimizer == "adamw",
            step=number,
            multiplier=multiplier,
            skip=skip,
        )
