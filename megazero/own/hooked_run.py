"""A pass whose computations a program of the user's makes: it calls a module, and the backward of a loss of its own.

The list of a step stays what it is. Hooks of the units say where the program is. In front of a unit's forward or
backward everything that the list has before this computation is executed, and the unit's parameters are there. The
graph of a micro-batch is one, which autograd goes through in the reverse order of the calls. What the program leaves
out is left out: a unit that is not called, or that no gradient reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megazero.own.units.stage import OwnBatch
from megazero.pipeline.actions import StepEnd
from megazero.pipeline.schedule_run import ScheduleRun, StageParts
from megazero.program.instruction import Instruction, Kind, Op

NOTHING = OwnBatch({})
"""Stands for a micro-batch, which the program has."""


class OtherOrder(RuntimeError):
    """The program computes a unit, and the list has this unit's computation behind it, or has none."""


class HookedRun(ScheduleRun):
    """One pass over a list of one chunk.

    `enter` is called in front of each computation of a unit, `leave` behind the last one of a micro-batch, and `close`
    behind all of them.

    unit  the number of the unit that is under way, or was last
    """

    def __init__(self, parts: StageParts, micro_batches: int, end: StepEnd | None, *, trains: bool) -> None:
        super().__init__(parts, [NOTHING] * micro_batches, end, trains=trains)
        self.unit = 0
        self._list: Sequence[Instruction] = ()
        self._next = 0
        """The place in the list of the next instruction."""
        self._places: dict[tuple[Kind, int, int], int] = {}
        """Those of computations, by (operation, micro-batch, unit)."""
        self._ends: dict[int, int] = {}
        """By micro-batch, the place behind its last computation."""
        self._under_way = -1
        """The place of the computation that is under way; -1: none is."""
        self._in_backward = False

    def open(self, instructions: Sequence[Instruction], loss_factor: Tensor | None) -> None:
        """Take over the list of the pass."""
        self.begin(instructions, loss_factor)
        self._list = instructions
        for place, i in enumerate(instructions):
            if i.is_compute:
                self._places |= {(i.op, i.micro_batch, unit): place for unit in self._units(i)}
                self._ends[i.micro_batch] = place + 1

    def enter(self, op: Op, micro_batch: int, unit: int) -> None:
        """Execute the list up to this computation of a unit. Raises OtherOrder."""
        place = self._places.get((op, micro_batch, unit), -1)
        if place < 0 or place != self._under_way:
            if place < self._next:
                raise OtherOrder
            self._end_computation()
            self._advance(place)
            if read := self.parts.reads(self._list[place]):
                self.state.ready(read)
            if op is not Op.FORWARD:
                self.state.gradients.before_backward(None)
                self._in_backward = True
            self._under_way, self._next = place, place + 1
        self.unit = unit

    def last_of(self, units: Sequence[int]) -> int:
        """Which of these calls of a module a backward comes to: the last one that it has not passed."""
        return max((unit for unit in units if unit <= self.unit), default=units[0])

    def leave(self, micro_batch: int) -> None:
        """Execute what the list still has of a micro-batch. Called behind its backward, or its forward in an
        evaluation.
        """
        self._end_computation()
        self._advance(self._ends[micro_batch])

    def close(self) -> None:
        """Execute the rest of the list, which has no computations any more."""
        self._advance(len(self._list))
        self.finish()

    def _advance(self, place: int) -> None:
        """Execute the list up to a place, but for its computations: the program leaves these out."""
        self.execute([i for i in self._list[self._next : place] if not i.is_compute])
        self._next = max(self._next, place)

    def _end_computation(self) -> None:
        if self._in_backward:
            self.state.gradients.after_backward()
        self._in_backward, self._under_way = False, -1
