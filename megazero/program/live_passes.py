"""How many passes of a rank are alive at a time: between their forward and their backward."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.program.instruction import Instruction, Kind, Op


def peak_activations(
    instructions: Sequence[Instruction], weights: Sequence[float] | None = None, kept: Sequence[float] | None = None
) -> float:
    """Largest sum of weights over the live (micro-batch, chunk) pairs of one rank, as `SimulationReport` counts them.

    weights  for each of the rank's chunks, such as bytes (default: 1)
    kept     for each chunk, the part of its weight that lives between the parts of a split backward (default: all)
    """
    trains = any(i.ends_backward for i in instructions)
    live = peak = 0.0
    for i in instructions:
        if not i.is_compute or (i.units is not None and i.units[0] > 0):
            continue
        whole = 1.0 if weights is None else weights[i.chunk]
        later = whole if kept is None else kept[i.chunk]
        changes: dict[Kind, float] = {
            Op.FORWARD: whole,
            Op.BACKWARD: -whole,
            Op.BACKWARD_INPUT: later - whole,
            Op.BACKWARD_WEIGHT: -later,
        }
        live += changes[i.op]
        peak = max(peak, live)
        live = live if trains else 0.0
    return peak
