"""Activations that leave the device, in the account of a walk through a list (`memory_walk`)."""

from __future__ import annotations

from megazero.program.effects import Scope
from megazero.program.instruction import Instruction, Op, Piece, moves_of
from megazero.program.memory import MemoryAccount, MemoryColumn, Place, kept_place
from megazero.program.step_bytes import StepBytes

COPIES = moves_of(Piece.ACTIVATIONS) | {Op.FREE, Op.FREE_HOST}
"""The instructions that move activations, and free what was moved."""


class ActivationCopies:
    """What `COPIES` do to an account.

    Activations are on the device up to FREE and from RETURN on. Their host buffer is taken at LEAVE and given back at
    their backward, which waits for the copy. Of those that go on to disks it is given back at FREE_HOST, and another
    one is taken at READ_ACTIVATIONS.
    """

    def __init__(self, account: MemoryAccount, scope: Scope, sizes: StepBytes) -> None:
        self.account, self.scope, self.sizes = account, scope, sizes

    def run(self, i: Instruction) -> None:
        """One of `COPIES`."""
        first, stop = self.scope.units_of(i)
        sizes = self.sizes.units[i.chunk]
        if i.op is Op.WRITE_ACTIVATIONS:
            return
        if i.op is Op.FREE_HOST:
            self.give_back(i)
            return
        if i.op in (Op.LEAVE, Op.READ_ACTIVATIONS):
            kept = self.sizes.host_buffer or sum(sizes[unit].kept + sizes[unit].input for unit in range(first, stop))
            self.account.hold(self._host(i), self.account.host.take(kept))
            return
        for unit in range(first, stop):
            self._move(i, kept_place(i, unit), sizes[unit].kept + sizes[unit].input * (unit > first))
        self._move(i, kept_place(i, first, "input"), sizes[first].input)

    def give_back(self, i: Instruction) -> None:
        """The host buffer of what a backward works with, if it has one, is free."""
        if size := self.account.drop(self._host(i)):
            self.account.host.spare.append(size)

    def _move(self, i: Instruction, place: Place, size: int) -> None:
        if i.op is Op.FREE:
            self.account.drop(place)
        else:
            self.account.hold(place, size)

    def _host(self, i: Instruction) -> Place:
        return Place(MemoryColumn.HOST, i.micro_batch, i.chunk, self.scope.units_of(i)[0])
