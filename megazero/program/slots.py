"""The slots of parts on their way (`zero.host_parts`), in a simulation: who has one, and when it is free."""

from __future__ import annotations

from megazero.config.tiers import SLOTS, Tier
from megazero.program.instruction import Instruction, Op
from megazero.program.shape import RankShape

TAKES = (Op.READ_STATE, Op.COPY_GRADIENT)
"""The first of these of a part takes a slot, the next one in turn."""
ENDS = {Tier.HOST: Op.COPY_PARAMETERS, Tier.DISK: Op.WRITE_STATE}
"""What a part does last with its slot, by where its optimizer state rests."""
USES = (Op.COPY_PARAMETERS, Op.WRITE_STATE)
"""What has to be over before another part takes the slot."""


class Slots:
    """The slots of a rank. They are taken in turn, so a part waits for the one that has had its slot before."""

    def __init__(self) -> None:
        self._over = [0.0] * SLOTS
        self._begins = [0.0] * SLOTS
        self._taken: dict[tuple[int, int], int] = {}
        self._turns = 0

    def begins(self, i: Instruction) -> float:
        """The time before which an instruction cannot start, because its part has no slot yet."""
        if i.op not in TAKES:
            return 0.0
        key = i.buckets[0], i.part
        if key not in self._taken:
            slot = self._turns % SLOTS
            self._begins[slot], self._over[slot] = self._over[slot], 0.0
            self._taken[key] = slot
            self._turns += 1
        return self._begins[self._taken[key]]

    def ran(self, i: Instruction, end: float, shape: RankShape) -> None:
        """An instruction of a part ends at this time."""
        if i.op not in USES:
            return
        key = i.buckets[0], i.part
        slot = self._taken[key]
        self._over[slot] = max(self._over[slot], end)
        if i.op is ENDS[shape.buckets[i.buckets[0]].parts[i.part].tier]:
            del self._taken[key]
