"""Zero-bubble schedules: a backward in two parts, of which the second fills what would be idle.

The gradient of a chunk's input is awaited by the stage before; the gradients of its weights are awaited by nobody
before the step's end. So the first part runs as early as it can, and the second where the stage would wait otherwise.

F, B and W are forward, input part and weight part of one micro-batch in one chunk. W needs what F kept, so activations
live from F to the end of W. Times below are for stages alike, F, B and W those of a whole stage.

    zb-h1  1F1B's order of F and B. Stage i lets i micro-batches wait for their W: p micro-batches live on every stage,
           where 1F1B holds p on its first. Idle: (p - 1)(F + B - W), of 1F1B's (p - 1)(F + B + W).
    zb-v   two chunks per stage, there and back (`mpu.chunks`). 2p chunks live, p stages' worth. With F = B = W and
           m >= 2p - 1 no stage waits between its first and its last computation.

Qi et al. 2023 (arXiv 2401.10241, sections 2.1 and 6); the V also Qi et al. 2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megazero.mpu.chunks import ChunkMap
from megazero.pipeline.instruction import Instruction, Op

_Order = list[Instruction]


def zb_h1(micro_batches: int, stages: int, stage: int) -> _Order:
    """The order of one stage: 1F1B, with a W as soon as more than `stage` of them wait."""
    order: _Order = []
    forwards = backwards = weights = 0
    while weights < micro_batches:
        if backwards - weights > stage or backwards == micro_batches:
            order.append(Instruction(Op.BACKWARD_WEIGHT, weights, 0))
            weights += 1
        elif forwards < min(micro_batches, backwards + stages - stage):
            order.append(Instruction(Op.FORWARD, forwards, 0))
            forwards += 1
        else:
            order.append(Instruction(Op.BACKWARD_INPUT, backwards, 0))
            backwards += 1
    return order


def zb_v(micro_batches: int, stages: int) -> list[_Order]:
    """The orders of all stages: whose W goes where depends on when a stage waits for the others."""
    orders = [_v_order(micro_batches, stages, stage) for stage in range(stages)]
    return _Filler(orders, ChunkMap(stages, 2, and_back=True), limit=2 * stages).fill()


def _v_order(micro_batches: int, stages: int, stage: int) -> _Order:
    """F and B of one stage.

    Laid out for as many micro-batches as fill the memory, of which those that do not exist are left out again: a
    micro-batch gone from every list takes nothing from the others.
    """
    total, to_end = max(micro_batches, 2 * stages - 1), stages - stage
    f0, f1, b0, b1 = (Op.FORWARD, 0), (Op.FORWARD, 1), (Op.BACKWARD_INPUT, 0), (Op.BACKWARD_INPUT, 1)
    started = 2 * stages - 1 - stage
    steps = [f0] * (2 * to_end - 1)  # until the first micro-batch is back
    steps += [f1, f0] * stage
    steps += [f1, b1] * to_end  # until its gradient is back
    steps += [f0, b0, f1, b1] * (total - started)
    steps += [b0, f1, b1] * (started - stages)
    steps += [b0, b1] * stage
    steps += [b0] * to_end
    numbers = dict.fromkeys((f0, f1, b0, b1), 0)
    order: _Order = []
    for step in steps:
        op, chunk = step
        if numbers[step] < micro_batches:
            order.append(Instruction(op, numbers[step], chunk))
        numbers[step] += 1
    return order


class _Filler:
    """Puts every W into an order of F and B, by running all stages with F = B = W and messages that take no time.

    Before each F or B a stage runs the Ws that fit into its wait for it; before an F also those whose memory it needs.
    With these times lists are as short as they can be, and they are good ones for others: what counts is where the
    waits are, and that follows from the order of F and B.

    limit  most chunks of a stage that live at a time
    """

    def __init__(self, orders: Sequence[_Order], chunks: ChunkMap, limit: int) -> None:
        self.orders, self.chunks, self.limit = orders, chunks, limit
        self.filled: list[_Order] = [[] for _ in orders]
        self.clock = [0] * len(orders)
        self.live = [0] * len(orders)
        self.waiting: list[deque[Instruction]] = [deque() for _ in orders]
        self.ended: dict[tuple[bool, int, int], int] = {}
        """When (backward, micro-batch, model chunk) was done."""

    def fill(self) -> list[_Order]:
        position = [0] * len(self.orders)
        able = deque(range(len(self.orders)))
        while able:
            stage = able.popleft()
            while position[stage] < len(self.orders[stage]):
                step = self.orders[stage][position[stage]]
                start = self._start(stage, step)
                if start is None:
                    break
                neighbour = self._run(stage, step, start)
                position[stage] += 1
                if neighbour is not None and neighbour != stage and neighbour not in able:
                    able.append(neighbour)
        for stage, waiting in enumerate(self.waiting):
            assert position[stage] == len(self.orders[stage]), "the order of forwards and backwards has a circle"
            self.filled[stage] += waiting
        return self.filled

    def _start(self, stage: int, step: Instruction) -> int | None:
        """When what a step needs is there; None: what it needs has not run yet."""
        number, last = self.chunks.model_chunk(stage, step.chunk), self.chunks.count - 1
        if not step.is_backward:
            return 0 if number == 0 else self.ended.get((False, step.micro_batch, number - 1))
        return self.ended.get((number < last, step.micro_batch, number + (number < last)))

    def _run(self, stage: int, step: Instruction, start: int) -> int | None:
        """Run a step, and before it what fits or must go; the stage that waits for it, if any."""
        waiting = self.waiting[stage]
        while waiting and (self.clock[stage] < start or (not step.is_backward and self.live[stage] == self.limit)):
            self.filled[stage].append(waiting.popleft())
            self.clock[stage] += 1
            self.live[stage] -= 1
        self.clock[stage] = max(self.clock[stage], start) + 1
        self.filled[stage].append(step)
        number = self.chunks.model_chunk(stage, step.chunk)
        self.ended[step.is_backward, step.micro_batch, number] = self.clock[stage]
        if step.is_backward:
            waiting.append(Instruction(Op.BACKWARD_WEIGHT, step.micro_batch, step.chunk))
        else:
            self.live[stage] += 1
            assert self.live[stage] <= self.limit
        behind = number - 1 if step.is_backward else number + 1
        return self.chunks.holder(behind)[0] if 0 <= behind < self.chunks.count else None
