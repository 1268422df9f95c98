"""What is wrong with a list, and where."""

from __future__ import annotations

from megazero.program.instruction import Instruction


class ProgramError(ValueError):
    """A list is incomplete, or its order is impossible, or the lists of several ranks deadlock.

    rank         whose list it is, in words; several ranks with a deadlock: None
    number       of the instruction in that list, from 0; None where the fault is no single instruction's
    instruction  itself
    """

    def __init__(
        self, what: str, rank: str | None = None, number: int | None = None, instruction: Instruction | None = None
    ) -> None:
        self.rank, self.number, self.instruction = rank, number, instruction
        at = "" if instruction is None else f" number {number} of its list, {instruction},"
        super().__init__(what if rank is None else f"{rank}:{at} {what}")
