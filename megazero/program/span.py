"""When an instruction ran."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.program.instruction import Instruction


@dataclass(frozen=True, slots=True)
class Span:
    """The start and the end of an instruction."""

    instruction: Instruction
    start: float
    end: float
