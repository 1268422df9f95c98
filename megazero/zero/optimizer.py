"""The optimizer over the ranges that this rank updates, and the end of a step, which its list calls at NORM and at
updates (`pipeline.actions.StepEnd`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_ops import apex
from fused_ops.adam import AdamRange, adam_steps, average_step, sgd_step
from fused_ops.norm import sum_of_squares
from megazero.config.schema import OptimizerConfig
from megazero.config.tiers import Tier
from megazero.disk.lanes import Need
from megazero.mpu.grid import ProcessGrid
from megazero.optim.clip import clip_coefficient
from megazero.program.instruction import UPDATE_HOST, Instruction
from megazero.zero.actions import UpdateValues
from megazero.zero.layout import Fragment, StoredFragment
from megazero.zero.mover import PartTensors
from megazero.zero.parts import Key, Part
from megazero.zero.portions import portions, spread, stored
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState

ADAM = {"megazero": adam_steps, "apex": apex.adam_steps}
"""Adam by --optimizer-impl."""
Reduce = Callable[..., list[Tensor]]
"""From values of this rank to their sums over all ranks, in one all-reduce."""


class UpdateRange(NamedTuple):
    """A range that this rank updates, on the device or in host memory.

    group    the number of the group whose options its parameters have
    average  that of its weights, if one is kept
    third    a third column, if the optimizer keeps one
    """

    step: AdamRange
    group: int
    average: Tensor | None
    third: Tensor | None


Rule = Callable[[Sequence[UpdateRange], UpdateValues], None]
"""An update of ranges with their gradients: it changes weights and columns in place, and nothing in a skipped step."""


class ShardedOptimizer:
    """AdamW, Adam or SGD on flat ranges: this rank's shards (from ZeRO-1 on), or whole buckets on every rank (ZeRO-0).

    (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.) The end of a step is `complete_reduction`, `sum_of_squares`
    (which the caller sums over all ranks), `update` for each bucket once, `end_step`. None of them waits for the
    device. With late updates `update` comes after `end_step`, before the next step's gradients do. With early updates
    it comes before the norm for some parts, and once more behind `go_back` if the norm is too large.

    rule        updates ranges; None: the configuration's own optimizer
    group_of    the number of each trained parameter's group by its name, where a step has options for groups
                (`UpdateValues.groups`); None: it has none
    step_count  0-dim float64 tensor on the device: number of steps that were not skipped
    """

    def __init__(
        self,
        state: ModelState,
        cfg: OptimizerConfig,
        grid: ProcessGrid,
        rule: Rule | None = None,
        group_of: Mapping[str, int] | None = None,
    ) -> None:
        self.state, self.cfg, self.grid, self._group_of = state, cfg, grid, group_of
        self._rule = self._configured if rule is None else rule
        self.step_count = torch.zeros((), dtype=torch.float64, device=grid.device)
        numbers = range(len(state.buckets))
        self._counted, self._others = ([self._gradients(n, counted=which) for n in numbers] for which in (True, False))

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
        elsewhere = [self.state.mover.squares(index) for index in range(len(self.state.buckets))]
        for views, there in zip(self._counted, elsewhere, strict=True):
            for squares in (*map(sum_of_squares, views), *there.counted):
                total += squares
        for views, there in zip(self._others, elsewhere, strict=True):
            for squares in (*map(sum_of_squares, views), *there.others):
                total += 0.0 * squares
        return total

    def update(self, i: Instruction, now: UpdateValues) -> None:
        """Update the ranges of an instruction's buckets that this rank owns, or a part of one, with the gradients times
        `now.multiplier`. In host memory the update is started, on the lane for that.

        Communicates nothing: the gathers of parameters that are kept whole are instructions of their own.
        """
        if i.op == UPDATE_HOST:
            needs, tensors = self.state.mover.part_to_update(i)
            # The result is whether the update has changed anything; copies and writes of what it makes wait for it.
            changed = self.state.tiers.host_updates.submit(self._update_there, i.key, needs, tensors, now).result
            self.state.mover.updating(i, changed)
            return
        self.state.gatherer.ready(i.buckets)
        self._update([own for index in i.buckets for own in self._ranges(index, i.part, now)], now)
        for index in i.buckets:
            if self.state.resting[index].sums is not Tier.DEVICE:
                self.state.mover.used((index, i.part))

    def go_back(self) -> None:
        """Have the optimizer state of all early parts be what it was before the step. Waits for their updates, and for
        gathers of what they have made."""
        self.state.mover.wait()
        self.state.gatherer.wait()
        self.state.mover.go_back()

    def end_step(self, skip: Tensor) -> None:
        """Count the step unless it was skipped, and have the next gradients begin new sums. skip: as in `UpdateValues`.

        Reduced gradients stay where they are until then.
        """
        self.step_count = torch.where(skip, self.step_count, self.step_count + 1.0)
        self.state.messages.end_step(skip)
        self.state.reducer.reset()

    @property
    def resident(self) -> bool:
        """Whether all that a checkpoint holds of this rank is in memory."""
        return not self.state.tiers.stores

    def stored(self) -> list[list[StoredFragment]]:
        """See `zero.portions.stored`."""
        return stored(self.state)

    def portions(
        self, fill: Collection[str] = (), only: Collection[str] | None = None
    ) -> Generator[list[Fragment], None, None]:
        """See `zero.portions.portions`. To load, fill the columns, set `step_count`, and call `after_load`."""
        return portions(self.state, fill, only)

    def after_load(self, filled: Collection[str] = ("weight",), only: Collection[str] | None = None) -> None:
        """See `zero.portions.spread`."""
        spread(self.state, filled, only)

    def _gradients(self, index: int, *, counted: bool) -> list[Tensor]:
        """Views of this rank's own gradients on the device that count in the norm here (or do not)."""
        if self.state.resting[index].sums is not Tier.DEVICE:
            return []
        runs = self.state.buckets[index].counted_runs(self.grid.at.tp, counted=counted)
        return [self.state.columns[Column.GRADIENT].view(index, *run) for run in runs]

    def _update_there(self, key: Key, needs: Sequence[Need], tensors: PartTensors, now: UpdateValues) -> bool:
        """Executed on the lane of updates: once all of a part is in host memory, update it."""
        for arrived in needs:
            arrived()
        return self.update_part(key, tensors, now)

    def update_part(self, key: Key, tensors: PartTensors, now: UpdateValues) -> bool:
        """Update a part with these tensors in host memory; return whether it has changed. Padding becomes zero."""
        index, part = key[0], self.state.resting[key[0]].parts[key[1]]
        weights, parameters, gradient = tensors[Column.MASTER], tensors[Column.PARAMETER], tensors[Column.GRADIENT]
        now = now.on_host()
        if now.skip:
            if self.state.resting[index].rests.in_files or now.again:
                parameters.copy_(weights)  # what rests on disks is written in a skipped step too
            return now.again
        second = tensors.get(Column.EXP_AVG_SQ, tensors[Column.EXP_AVG])
        parameters[max(0, self.state.buckets[index].layout.used - part.start) :].zero_()
        average, third = tensors.get(Column.EMA), tensors.get(Column.MAX_EXP_AVG_SQ)
        ranges = list[UpdateRange]()
        for start, stop, decay, group in self._decay_ranges(index, part, now.groups):
            own = slice(start - part.start, stop - part.start)
            step = AdamRange(
                parameters[own], weights[own], gradient[own], tensors[Column.EXP_AVG][own], second[own], decay
            )
            beside = (None if values is None else values[own] for values in (average, third))
            ranges.append(UpdateRange(step, group, *beside))
        self._update(ranges, now)
        return True

    def _decay_ranges(
        self, index: int, part: Part | None, groups: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[tuple[int, int, float, int]]:
        """The ranges of a bucket, or of a part of it, that this rank updates, as (start, stop, weight decay, group).
        Without groups two at most; with groups one for each run of parameters of the same group.
        """
        first, last = self.state.columns[Column.EXP_AVG].range_of(index) if part is None else part[:2]
        for start, stop, decay, group in self._alike(index, groups):
            if max(first, start) < min(last, stop):
                yield max(first, start), min(last, stop), decay, group

    def _alike(self, index: int, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, float, int]]:
        """The ranges of a whole bucket whose elements have the same options. Without groups the kind of a parameter
        decides whether it has weight decay.
        """
        layout = self.state.buckets[index].layout
        if not groups:
            yield 0, layout.decayed, self.cfg.weight_decay, 0
            yield layout.decayed, layout.used, 0.0, 0
            return
        assert self._group_of is not None, "options of groups, and nobody has said what is in a group"
        group_of = self._group_of
        for group, same in groupby(layout.entries, lambda entry: group_of[entry.spec.name]):
            entries = list(same)
            yield entries[0].offset, entries[-1].stop, groups[group].get("weight_decay", 0.0), group

    def _ranges(self, index: int, part: int, now: UpdateValues) -> Iterator[UpdateRange]:
        """The ranges of a part by its number (-1: of the bucket) on the device. SGD has no second moment; the first
        stands in its place.
        """
        table = self.state.columns
        second = table.get(Column.EXP_AVG_SQ, table[Column.EXP_AVG])
        average, third = table.get(Column.EMA), table.get(Column.MAX_EXP_AVG_SQ)
        rounds = self.state.has_master and table[Column.PARAMETER].is_on_device(index)
        whole_or_part = None if part < 0 else self.state.resting[index].parts[part]
        for start, stop, decay, group in self._decay_ranges(index, whole_or_part, now.groups):
            place = index, start, stop
            step = AdamRange(
                table[Column.PARAMETER].view(*place) if rounds else None,
                self.state.weights.view(*place),
                self._gradient(*place, part),
                table[Column.EXP_AVG].view(*place),
                second.view(*place),
                decay,
            )
            beside = (None if column is None else column.view(*place) for column in (average, third))
            yield UpdateRange(step, group, *beside)

    def _gradient(self, index: int, start: int, stop: int, part: int) -> Tensor:
        """A range of a bucket's gradient for an update on the device."""
        if self.state.resting[index].sums is not Tier.DEVICE:
            return self.state.mover.fetched((index, part), start, stop)
        return self.state.columns[Column.GRADIENT].view(index, start, stop)

    def _update(self, ranges: Sequence[UpdateRange], now: UpdateValues) -> None:
        """Update ranges, those of a group with its options, and behind each the average of its weights."""
        for group, options in now.of_groups():
            if same := [own for own in ranges if own.group == group]:
                self._rule(same, options)
        for own in ranges:
            if own.average is not None:
                assert self.cfg.ema_decay is not None, "an average is kept with a decay"
                average_step(own.average, own.step.master, decay=self.cfg.ema_decay, skip=now.skip)

    def _configured(self, updated: Sequence[UpdateRange], now: UpdateValues) -> None:
        """Adam, AdamW or SGD, as the configuration says."""
        changed = {name: value for name, value in now.options.items() if name != "lr"}
        cfg, ranges = replace(self.cfg, **changed) if changed else self.cfg, [own.step for own in updated]
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
            step=now.number,
            multiplier=now.multiplier,
            skip=now.skip,
        )


@dataclass
class TrainingStepEnd:
    """The end of one step; a `pipeline.actions.StepEnd`.

    optimizer  updates the parameters
    reduce     sums values over all ranks
    lr         learning rate of this step
    groups     options of groups of parameters (`UpdateValues.groups`)
    positions  number of token positions of the global batch
    scale      the loss scale, 0-dim
    clip_grad  the largest gradient norm
    tokens     number of unmasked tokens on this rank, 0 where it does not report the loss
    reports    whether this rank's loss enters the sum
    stops      whether this rank requests a stop; called when the gradients are there
    early_tokens
               number of unmasked tokens of all ranks, where some updates come before the norm
    values     what updates take. Before `norm`: that of the step before if its updates are made in this one, what early
               updates take, or None

    After `norm`, the sums over all ranks: loss_sum, all_tokens, asked (requests to stop); and grad_norm before
    clipping, bad: whether the step is skipped, and clipped: whether it is skipped, or its gradient is made shorter.
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
    early_tokens: Tensor | None = None
    values: UpdateValues | None = None
    groups: tuple[Mapping[str, Any], ...] = ()
    loss_sum: Tensor = field(init=False)
    all_tokens: Tensor = field(init=False)
    asked: Tensor = field(init=False)
    grad_norm: Tensor = field(init=False)
    bad: Tensor = field(init=False)
    clipped: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.early_tokens is not None:  # as if the norm clipped nothing
            multiplier = self.positions / (self.early_tokens * self.scale)
            never = torch.zeros_like(self.early_tokens, dtype=torch.bool)
            self.values = UpdateValues(self.lr, multiplier, never, self.optimizer.step_count + 1.0, self.groups)

    @property
    def early(self) -> bool:
        """Whether some updates come before the norm."""
        return self.early_tokens is not None

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
        coefficient = clip_coefficient(self.grad_norm, self.clip_grad)
        self.clipped = self.bad | (coefficient != 1.0)
        multiplier = unscale * coefficient
        self.values = UpdateValues(self.lr, multiplier, self.bad, self.optimizer.step_count + 1.0, self.groups)

    def update_again(self, make: Callable[[UpdateValues], None]) -> None:
        """Make the early updates again, with what the norm has said. make: makes them. A collective of all ranks."""
        assert self.early and self.values is not None, "no update came before the norm"
        self.optimizer.go_back()
        make(replace(self.values, again=True))

    def update(self, i: Instruction) -> None:
        """Update what an instruction says (`ShardedOptimizer.update`)."""
        assert self.values is not None, "an update before the norm, and none is owed"
        self.optimizer.update(i, self.values)


@dataclass(frozen=True)
class OwedStepEnd:
    """The updates of a step that is over; a `pipeline.actions.StepEnd` of a list that has no others."""

    optimizer: ShardedOptimizer
    values: UpdateValues

    def norm(self, loss_sum: Tensor) -> None:
        raise AssertionError("a list of updates alone has no norm")

    def update(self, i: Instruction) -> None:
        """Update what an instruction says (`ShardedOptimizer.update`)."""
        self.optimizer.update(i, self.values)
