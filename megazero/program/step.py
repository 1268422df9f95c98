"""From a schedule to the list of a whole step: one pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megazero.program.checker import check_list
from megazero.program.instruction import Instruction
from megazero.program.passes.before_norm import (
    place_early_updates,
    place_reads_ahead,
    updates_again,
    updates_read_ahead,
)
from megazero.program.passes.cut import Pass, cut, every_pass, first_passes
from megazero.program.passes.gathers import one_unit, place_gathers, place_loads, two_units
from megazero.program.passes.gradients import place_sums
from megazero.program.passes.late import place_late_updates
from megazero.program.passes.leaving import ActivationFiles, place_leaving
from megazero.program.passes.reductions import place_reductions, reducing_passes
from megazero.program.passes.slots import place_slots
from megazero.program.passes.updates import place_across, place_norm, updates_of
from megazero.program.passes.vertical import Groups, VerticalOrder, turn
from megazero.program.scope import Border, Scope
from megazero.program.shape import RankShape


@dataclass(frozen=True)
class StepOptions:
    """How the passes place instructions.

    reduce_every    reduce gradients of which a rank keeps less than the whole in every backward (or group of them);
                    else in the last one of each chunk
    overlap         cut computations by unit where gradients or parameters travel meanwhile
    gathered_bytes  budget of gathered parameters; None: two units, or one where nothing travels
    regather        when parameters are gathered again: one of `passes.gathers.REGATHER`
    late            make the updates of a step in the next one (--late-update, off by default)
    vertical        take groups of micro-batches through each unit together, as a run with parameters on disks does by
                    default (`config.derive.micro_batch_order`); None: horizontal order
    leaving         share of the activations' bytes that leaves the device, 0 to 1 (`passes.leaving`)
    files           to which they go on from host memory; None: they stay there
    ahead           read the first optimizer state from disks before the norm is known (`passes.before_norm`)
    early           make some updates before the norm is known (--early-update, off by default), in the steps that are
                    asked for it
    """

    reduce_every: bool = False
    overlap: bool = True
    gathered_bytes: int | None = None
    regather: str = "micro-batch"
    late: bool = False
    vertical: VerticalOrder | None = None
    leaving: float = 0.0
    files: ActivationFiles | None = None
    ahead: bool = False
    early: bool = False

    def groups(self, micro_batches: int) -> Groups | None:
        """The groups of a step's micro-batches; None in horizontal order."""
        return None if self.vertical is None else self.vertical.groups(micro_batches)

    @property
    def border(self) -> Border:
        """That of a step which follows another."""
        return self.border_of(owed=self.late, early=self.early)

    def border_of(self, *, owed: bool, early: bool) -> Border:
        """That of a step. owed: whether it makes the updates of the step before. early: whether it makes some before
        its norm.
        """
        assert self.late or not owed, "a step on time leaves no updates to the next"
        assert self.early or not early, "the step's options have no early updates"
        return Border(owed, self.late, self.late and self.ahead, early)

    @property
    def settling(self) -> Border:
        """That of a list of updates alone, behind a step with late updates, or with early ones that were wrong."""
        return Border(owed=True, ahead=self.late and self.ahead, early=self.early)


def training_step(
    schedule: Sequence[Instruction],
    shape: RankShape,
    options: StepOptions,
    *,
    groups: Groups | None = None,
    owed: bool | None = None,
    early: bool | None = None,
) -> tuple[Instruction, ...]:
    """The list of a training step.

    schedule  computations and transfers of the rank
    groups    in vertical order: the micro-batches of each group that the schedule numbers
    owed      whether it makes the updates of the step before; default: with late updates
    early     whether it makes some updates before its norm; default: with early updates

    Raises BudgetError where the budget does not hold the parameters of one computation.
    """
    listed = cut(schedule, shape, _cuts(schedule, shape, options)) if groups is None else turn(schedule, shape, groups)
    listed = place_across(place_reductions(listed, shape, every=options.reduce_every, groups=groups), shape)
    listed = place_sums(listed, shape, overlap=options.overlap)
    listed = place_norm(listed, shape)
    early = options.early if early is None else early
    ahead = options.ahead and not early  # early updates have the slots that the first reads would take
    if early:
        listed = _with_gathers((*listed, *updates_of(shape.trained, shape, shape.early)), shape, options)
        listed = place_early_updates(listed, shape, overlap=options.overlap)
    elif not options.late:
        listed = _with_gathers((*listed, *_updates(shape, ahead=ahead)), shape, options)
    else:
        listed = _with_gathers(listed, shape, options)
        listed = listed if owed is False else _with_late_updates(listed, shape, ahead=options.ahead)
    listed = place_leaving(listed, shape, options.leaving, options.files) if options.leaving else listed
    listed = place_reads_ahead(listed, shape) if ahead else listed
    crosses = shape.read_ahead if options.late and options.ahead else ()
    return place_slots(listed, shape, held=() if owed is False else crosses, left=crosses)


def settling_list(shape: RankShape, options: StepOptions) -> tuple[Instruction, ...]:
    """The list of the updates alone that a step has left, or that it has to make again, and of the gathers that follow
    them.
    """
    if options.early:
        return place_slots(updates_again(shape), shape)
    ahead = options.ahead  # the step has read the first optimizer state for them
    return place_slots(_updates(shape, ahead=ahead), shape, held=shape.read_ahead if ahead else ())


def _updates(shape: RankShape, *, ahead: bool) -> tuple[Instruction, ...]:
    """All updates. ahead: whether the first optimizer state has been read."""
    if not ahead:
        return updates_of(shape.trained, shape)
    return (*updates_read_ahead(shape), *updates_of(shape.trained, shape, shape.read_ahead))


def _with_late_updates(
    instructions: Sequence[Instruction], shape: RankShape, *, ahead: bool
) -> tuple[Instruction, ...]:
    if not ahead:
        return place_late_updates(instructions, shape)
    return (*updates_read_ahead(shape), *place_late_updates(instructions, shape, shape.read_ahead))


def evaluation_step(
    forwards: Sequence[Instruction], shape: RankShape, options: StepOptions, *, groups: Groups | None = None
) -> tuple[Instruction, ...]:
    """The list of an evaluation. forwards: forward passes and their transfers. groups: as in `training_step`."""
    in_order = (
        cut(forwards, shape, _cut_forward(forwards, shape, options))
        if groups is None
        else turn(forwards, shape, groups)
    )
    return place_slots(_with_gathers(in_order, shape, options), shape)


def _cuts(schedule: Sequence[Instruction], shape: RankShape, options: StepOptions) -> set[Pass]:
    """The passes of a training step that are cut: where something is gathered, updated or reduced meanwhile, or leaves.
    Whole gradients that leave are to be those of few units at a time. A unit is updated early as soon as its own
    backward is over. The cuts are those of steps with early updates and without, so that both have the same graphs.
    """
    if options.leaving:
        return every_pass(schedule)
    cuts = _cut_forward(schedule, shape, options)
    buckets = [shape.buckets[number] for number in shape.trained]
    if options.overlap and any(own.updated_off_device for own in buckets):
        cuts |= first_passes(schedule)
    leave_early = bool(options.early and shape.early)
    if leave_early or any(own.sums_leave or (options.overlap and own.travels) for own in buckets):
        cuts |= reducing_passes(schedule, every=options.reduce_every)
    return cuts


def _cut_forward(schedule: Sequence[Instruction], shape: RankShape, options: StepOptions) -> set[Pass]:
    """The passes whose forward is cut: all where parameters are gathered for each use; the first one of a chunk where
    they may still be on their way after the update.
    """
    if any(bucket.gathered for bucket in shape.buckets):
        return every_pass(schedule)
    arriving = options.overlap and any(bucket.gathered_after_update for bucket in shape.buckets)
    return first_passes(schedule) if arriving else set()


def _with_gathers(
    instructions: Sequence[Instruction], shape: RankShape, options: StepOptions
) -> tuple[Instruction, ...]:
    if not any(bucket.gathered for bucket in shape.buckets):
        return tuple(instructions)
    budget = gathered_budget(instructions, shape, options)
    placed = place_gathers(instructions, shape, budget, options.regather, by_row=options.vertical is not None)
    return place_loads(placed, shape)


def gathered_budget(instructions: Sequence[Instruction], shape: RankShape, options: StepOptions) -> int:
    """The budget of gathered parameters of a list, with or without its gathers.

    A second unit is there to travel beside the computation of the first. Codes on the device that no other rank has a
    share of do not travel.
    """
    if options.gathered_bytes is not None:
        return options.gathered_bytes
    travel = any(bucket.is_loaded or (bucket.gathered and bucket.shards > 1) for bucket in shape.buckets)
    return two_units(instructions, shape) if travel else one_unit(instructions, shape)


class Lists:
    """The lists of one rank by number of micro-batches. Each is made once, and checked (`program.checker`).

    schedule_of   from a number of micro-batches to computations and transfers of a training step; in vertical order
                  those of groups
    forwards_of   the same for an evaluation
    shape         the rank's model state; for a model without a model state `shape.without_state`
    model_chunks  number of chunks of the whole model
    """

    def __init__(
        self,
        schedule_of: Callable[[int], Sequence[Instruction]],
        forwards_of: Callable[[int], Sequence[Instruction]],
        shape: RankShape,
        options: StepOptions,
        model_chunks: int,
    ) -> None:
        self.shape, self.options, self.model_chunks = shape, options, model_chunks
        self._schedule_of, self._forwards_of = schedule_of, forwards_of
        self._made: dict[tuple[str, int], tuple[Instruction, ...]] = {}

    def training(self, micro_batches: int, *, owed: bool = False, early: bool = False) -> tuple[Instruction, ...]:
        """The list of a training step. owed: whether it makes the updates that the step before has left. early: whether
        it makes some updates before its norm.
        """
        border = self.options.border_of(owed=owed, early=early)
        name = "training" + ", updates owed" * owed + ", updates early" * early
        return self._list(
            name,
            micro_batches,
            lambda: training_step(
                self._schedule_of(micro_batches),
                self.shape,
                self.options,
                groups=self.options.groups(micro_batches),
                owed=owed,
                early=early,
            ),
            Scope(self.shape, self.model_chunks, border=border),
        )

    def evaluation(self, micro_batches: int) -> tuple[Instruction, ...]:
        """The list of an evaluation."""
        return self._list(
            "evaluation",
            micro_batches,
            lambda: evaluation_step(
                self._forwards_of(micro_batches), self.shape, self.options, groups=self.options.groups(micro_batches)
            ),
            Scope(self.shape, self.model_chunks, trains=False),
        )

    def settling(self) -> tuple[Instruction, ...]:
        """The list of the updates alone that a step has left, or has to make again."""
        scope = Scope(self.shape, self.model_chunks, trains=False, border=self.options.settling)
        return self._list("settling", 0, lambda: settling_list(self.shape, self.options), scope)

    def _list(
        self, name: str, micro_batches: int, make: Callable[[], tuple[Instruction, ...]], scope: Scope
    ) -> tuple[Instruction, ...]:
        key = name, micro_batches
        if key not in self._made:
            made = make()
            check_list(made, scope, micro_batches, budget=gathered_budget(made, self.shape, self.options))
            self._made[key] = made
        return self._made[key]
