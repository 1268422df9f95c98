"""Vertical order: a group of micro-batches passes a unit before any of them goes on to the next one.

Parameters that are brought for each use are then brought once for a group and pass, not once for each micro-batch. A
gradient is reduced once for a group, when all of it have added to it. The price is memory: the activations of a whole
group are alive, and between two units the hidden states of a whole group are. (GreedySnake: arXiv 2512.17570.)

A schedule orders groups among the stages as it orders micro-batches otherwise. This pass replaces a computation of a
group by rows, one for each unit. A row has a computation for each micro-batch. So the hidden states of a group arrive
in the first row of a chunk, and leave in its last one. With one group, the default, every schedule is all forwards
and then all backwards.

Where a group's backward follows its forward through the model's last chunk at once, each micro-batch does forward and
backward of the last unit, the head, one after the other in one row. What the head keeps is then there for one
micro-batch, not for a group.

Micro-batches have the same order in every row. In the reverse order from row to row ("snake") the hidden state that was
made last would be used first. That is worth bytes only where hidden states leave the device between two rows, and here
they stay. With one order gradients are sums in the order of the micro-batches, as in horizontal order, to the bit; and
stages send in the order in which the next one receives, whatever their numbers of units are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megazero.program.instruction import Instruction, Op
from megazero.program.shape import RankShape
from megazero.program.transfers import ComputationStep, posted_ahead

Groups = tuple[range, ...]
"""The micro-batches of each group, in order."""
Row = tuple[Instruction, ...]
"""What each micro-batch of a group computes of a unit. The instructions have the number of the group."""


@dataclass(frozen=True)
class VerticalOrder:
    """most: micro-batches of a group at most; None: all of a step are one group."""

    most: int | None = None

    def groups(self, micro_batches: int) -> Groups:
        """As few groups as possible, whose sizes differ by one at most, the larger ones first."""
        count = 1 if self.most is None else -(-micro_batches // self.most)
        bounds = [-(-number * micro_batches // count) for number in range(count + 1)]
        return tuple(range(start, stop) for start, stop in pairwise(bounds))


def turn(schedule: Sequence[Instruction], shape: RankShape, groups: Groups) -> tuple[Instruction, ...]:
    """The list of a rank in vertical order: computations of units, and a message for each micro-batch.

    schedule: computations and transfers whose micro-batches are the numbers of groups.
    """
    transfers = {(i.is_send, i.is_backward, i.micro_batch, i.chunk): i for i in schedule if i.is_transfer}

    def message(of: Instruction, micro_batch: int, *, sent: bool) -> Instruction | None:
        found = transfers.get((sent, of.is_backward, of.micro_batch, of.chunk))
        at_end = _is_last(of, shape) if sent else _is_first(of, shape)
        return found._replace(micro_batch=micro_batch) if found is not None and at_end else None

    def step(of: Instruction, micro_batch: int) -> ComputationStep:
        receive, send = (message(of, micro_batch, sent=sent) for sent in (False, True))
        return receive, of._replace(micro_batch=micro_batch), send

    rows = _rows(schedule, shape)
    return posted_ahead(step(of, number) for row in rows for number in groups[row[0].micro_batch] for of in row)


def _rows(schedule: Sequence[Instruction], shape: RankShape) -> list[Row]:
    """The rows of a list, in order."""
    rows: list[Row] = []
    leaves = {(i.micro_batch, i.chunk) for i in schedule if i.op is Op.SEND_FORWARD}
    for i in schedule:
        if not i.is_compute:
            continue
        units = range(len(shape.units[i.chunk]))
        order = units if i.op is Op.FORWARD else reversed(units)
        own = [i._replace(units=(unit, unit + 1)) for unit in order]
        if rows and (i.micro_batch, i.chunk) not in leaves and _turns_back(rows[-1][-1], own[0]):
            rows[-1] = (*rows[-1], own.pop(0))
        rows += [(of,) for of in own]
    return rows


def _turns_back(last: Instruction, following: Instruction) -> bool:
    """Whether a backward begins with the unit that its group's forward has ended with just before. If the group leaves
    the stage in between, its gradients are not there yet: then this is no head.
    """
    here, there = ((i.micro_batch, i.chunk, i.units) for i in (last, following))
    return last.op is Op.FORWARD and following.is_backward and here == there


def _is_first(of: Instruction, shape: RankShape) -> bool:
    """Whether the computation of a unit is the first one of its pass through the chunk. One of weights has no input."""
    assert of.units is not None
    first, stop = of.units
    return of.op is not Op.BACKWARD_WEIGHT and (stop == len(shape.units[of.chunk]) if of.is_backward else first == 0)


def _is_last(of: Instruction, shape: RankShape) -> bool:
    """Whether it is the last one. One of weights has no output."""
    assert of.units is not None
    first, stop = of.units
    return of.op is not Op.BACKWARD_WEIGHT and (first == 0 if of.is_backward else stop == len(shape.units[of.chunk]))
