"""The times that a simulation of a schedule takes: of each model chunk's computations, and of a message."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.program.instruction import Op


@dataclass(frozen=True)
class ChunkTimes:
    """Times of one micro-batch, in seconds or any other unit.

    forward   of each model chunk
    backward  of each model chunk, both parts together
    message   of one message
    weight    of each model chunk: the weights' part of `backward`; None: half of it
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    message: float = 0.0
    weight: tuple[float, ...] | None = None

    def of(self, op: Op, model_chunk: int) -> float:
        """The time of a computation."""
        if op is Op.FORWARD:
            return self.forward[model_chunk]
        whole = self.backward[model_chunk]
        if op is Op.BACKWARD:
            return whole
        weight = whole / 2 if self.weight is None else self.weight[model_chunk]
        return weight if op is Op.BACKWARD_WEIGHT else whole - weight


def uniform_times(
    chunks: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0, weight: float | None = None
) -> ChunkTimes:
    """The same times for each of `chunks` model chunks. weight: the weights' part of `backward`."""
    return ChunkTimes(
        (forward,) * chunks, (backward,) * chunks, message, None if weight is None else (weight,) * chunks
    )


def profiled_times(
    stages: int, virtual_stages: int, forward: float, backward_input: float, backward_weight: float, message: float
) -> ChunkTimes:
    """Times that are given for a whole stage, divided equally among its chunks; that of a message is not divided."""
    v = virtual_stages
    return uniform_times(stages * v, forward / v, (backward_input + backward_weight) / v, message, backward_weight / v)
