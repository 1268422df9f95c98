"""From a schedule to the list of a whole step: one pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megazero.program.checker import check_list
from megazero.program.effects import Scope
from megazero.program.instruction import Instruction
from megazero.program.passes.cut import cut, every_pass, first_passes
from megazero.program.passes.gathers import place_gathers, two_units
from megazero.program.passes.reductions import place_reductions, reducing_passes
from megazero.program.passes.updates import place_across, place_updates
from megazero.program.shape import RankShape


@dataclass(frozen=True)
class StepOptions:
    """How the passes place instructions.

    reduce_every    reduce gradients in every backward; else in the last one of each chunk
    overlap         cut computations by unit where gradients or parameters travel meanwhile
    gathered_bytes  budget of gathered parameters; None: two units
    regather        when parameters are gathered again: one of `passes.gathers.REGATHER`
    """

    reduce_every: bool = False
    overlap: bool = True
    gathered_bytes: int | None = None
    regather: str = "micro-batch"


def training_step(schedule: Sequence[Instruction], shape: RankShape, options: StepOptions) -> tuple[Instruction, ...]:
    """The list of a training step. schedule: computations and transfers of the rank.

    Raises BudgetError where the budget does not hold the parameters of one computation.
    """
    cuts = set(_cut_forward(schedule, shape, options))
    if options.overlap and any(shape.buckets[number].travels for number in shape.trained):
        cuts |= reducing_passes(schedule, every=options.reduce_every)
    listed = place_reductions(cut(schedule, shape, cuts), shape, every=options.reduce_every)
    return _with_gathers(place_updates(place_across(listed, shape), shape), shape, options)


def evaluation_step(forwards: Sequence[Instruction], shape: RankShape, options: StepOptions) -> tuple[Instruction, ...]:
    """The list of an evaluation. forwards: forward passes and their transfers."""
    return _with_gathers(cut(forwards, shape, _cut_forward(forwards, shape, options)), shape, options)


def _cut_forward(schedule: Sequence[Instruction], shape: RankShape, options: StepOptions) -> set[tuple[int, int]]:
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
    return place_gathers(instructions, shape, gathered_budget(instructions, shape, options), options.regather)


def gathered_budget(instructions: Sequence[Instruction], shape: RankShape, options: StepOptions) -> int:
    """The budget of gathered parameters of a list, with or without its gathers."""
    return two_units(instructions, shape) if options.gathered_bytes is None else options.gathered_bytes


class Lists:
    """The lists of one rank by number of micro-batches. Each is made once, and checked (`program.checker`).

    schedule_of   from a number of micro-batches to computations and transfers of a training step
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
        self._make = {
            True: lambda m: training_step(schedule_of(m), shape, options),
            False: lambda m: evaluation_step(forwards_of(m), shape, options),
        }
        self._made: dict[tuple[bool, int], tuple[Instruction, ...]] = {}

    def training(self, micro_batches: int) -> tuple[Instruction, ...]:
        """The list of a training step."""
        return self._list(True, micro_batches)

    def evaluation(self, micro_batches: int) -> tuple[Instruction, ...]:
        """The list of an evaluation."""
        return self._list(False, micro_batches)

    def _list(self, trains: bool, micro_batches: int) -> tuple[Instruction, ...]:
        key = trains, micro_batches
        if key not in self._made:
            made = self._make[trains](micro_batches)
            scope = Scope(self.shape, self.model_chunks, trains)
            check_list(made, scope, micro_batches, budget=gathered_budget(made, self.shape, self.options))
            self._made[key] = made
        return self._made[key]
