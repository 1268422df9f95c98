"""Zero-bubble schedules: a backward is split in two parts, and the second part fills time that would be idle.

The previous stage waits for the gradient of a chunk's input. The gradients of its weights are needed only at the end of
the step. So the first part runs as early as possible, and the second part where the stage would otherwise wait.

F, B and W are forward, input part and weight part of one micro-batch in one chunk. W needs the activations that F kept,
so these live from F to the end of W. In the times below all stages are equal, and F, B and W are those of a whole
stage.

    zb-h1  1F1B's order of F and B. Stage i delays W by i micro-batches, so every stage keeps activations of p
           micro-batches; under 1F1B only the first one does. Idle time: (p - 1)(F + B - W); 1F1B's is
           (p - 1)(F + B + W).
    zb-v   Two chunks per stage, there and back (`mpu.chunks`). A stage keeps activations of 2p chunks, as much as of p
           micro-batches. With F = B = W and m >= 2p - 1 no stage waits between its first and its last computation.

Qi et al. 2023 (arXiv 2401.10241, sections 2.1 and 6); the V also Qi et al. 2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megazero.mpu.chunks import ChunkMap
from megazero.program.instruction import Instruction, Op

_Order = list[Instruction]


def zb_h1(micro_batches: int, stages: int, stage: int) -> _Order:
    """The order of one stage: 1F1B, with a W as soon as more than `stage` micro-batches wait for theirs."""
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
    """The orders of all stages. Where a W goes depends on when its stage waits for the others."""
    orders = [_v_order(micro_batches, stages, stage) for stage in range(stages)]
    return _Filler(orders, ChunkMap(stages, 2, and_back=True), limit=2 * stages).fill()


def _v_order(micro_batches: int, stages: int, stage: int) -> _Order:
    """F and B of one stage.

    The order is made for at least 2p - 1 micro-batches, and those that do not exist are then left out. Without them the
    lists of all stages still fit together.
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
    """Inserts every W into an order of F and B, by simulating all stages with F = B = W and messages without latency.

    While a stage waits for the input of an F or B, it runs as many Ws as fit. Before an F it also runs the Ws whose
    memory the F needs. With these times the lists are as short as possible. They are good for other times too, since
    the waits follow mainly from the order of F and B.

    limit  most chunks of a stage whose activations are alive at a time
    """

    def __init__(self, orders: Sequence[_Order], chunks: ChunkMap, limit: int) -> None:
        self.orders, self.chunks, self.limit = orders, chunks, limit
        self.filled: list[_Order] = [[] for _ in orders]
        self.clock = [0] * len(orders)
        self.live = [0] * len(orders)
        self.waiting: list[deque[Instruction]] = [deque() for _ in orders]
        self.ended: dict[tuple[bool, int, int], int] = {}
        """The time at which (backward, micro-batch, model chunk) ended."""

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
        """The time at which a step's input is ready; None if it has not been computed yet."""
        number, last = self.chunks.model_chunk(stage, step.chunk), self.chunks.count - 1
        if not step.is_backward:
            return 0 if number == 0 else self.ended.get((False, step.micro_batch, number - 1))
        return self.ended.get((number < last, step.micro_batch, number + (number < last)))

    def _run(self, stage: int, step: Instruction, start: int) -> int | None:
        """Run a step, after the Ws that fit or must come before it. Returns the stage that needs the step's output."""
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
