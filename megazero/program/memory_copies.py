"""Activations that leave the device, in the account of a walk through a list (`memory_walk`)."""

from __future__ import annotations

from megazero.config.tiers import Tier
from megazero.program.effects import Scope
from megazero.program.instruction import (
    LEAVE,
    READ_ACTIVATIONS,
    WRITE_ACTIVATIONS,
    Free,
    Instruction,
    Piece,
)
from megazero.program.memory import MemoryAccount, MemoryColumn, Place, kept_place
from megazero.program.step_bytes import StepBytes


class ActivationCopies:
    """What `ACTIVATION_MOVES` do to an account.

    Activations are on the device until they are freed, and from the copy back on. Their host buffer is taken at the
    copy to host memory and given back at their backward, which waits for the copy back. Of those that go on to disks it
    is given back once they are written, and another one is taken at the read.
    """

    def __init__(self, account: MemoryAccount, scope: Scope, sizes: StepBytes) -> None:
        self.account, self.scope, self.sizes = account, scope, sizes

    def run(self, i: Instruction) -> None:
        """One of `ACTIVATION_MOVES`."""
        first, stop = self.scope.units_of(i)
        sizes = self.sizes.units[i.chunk]
        if i.op == WRITE_ACTIVATIONS:
            return
        if i.op == Free(Piece.ACTIVATIONS, Tier.HOST):
            self.give_back(i)
            return
        if i.op in (LEAVE, READ_ACTIVATIONS):
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
        if isinstance(i.op, Free):
            self.account.drop(place)
        else:
            self.account.hold(place, size)

    def _host(self, i: Instruction) -> Place:
        return Place(MemoryColumn.HOST, i.micro_batch, i.chunk, self.scope.units_of(i)[0])
