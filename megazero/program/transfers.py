"""Where messages between stages stand beside the computations of a list."""

from __future__ import annotations

from collections.abc import Iterable

from megazero.program.instruction import Instruction

ComputationStep = tuple[Instruction | None, Instruction, Instruction | None]
"""A computation, with the receive of its input and the send of its output where there are any."""


def posted_ahead(steps: Iterable[ComputationStep]) -> tuple[Instruction, ...]:
    """Flatten (receive, computation, send) steps, each receive before the computation of the step in front of it."""
    laid: list[Instruction] = []
    held: list[Instruction] = []
    for receive, compute, send in steps:
        laid += [receive] if receive else []
        laid += held
        held = [compute, send] if send else [compute]
    return tuple(laid + held)
