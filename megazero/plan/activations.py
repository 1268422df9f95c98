"""Bytes of activations: what each unit of a run (embedding, block, head) keeps, and the most that it takes meanwhile;
those of a model chunk, and of a stage over its list of instructions.

Each kind of unit is measured on the meta device (`pipeline.measured`). All else is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from fused_ops.attention.selection import Body
from megazero.config.derive import NONE, RecomputeTable, padded_vocab
from megazero.config.dtypes import compute_dtype
from megazero.config.layers.kinds import Layer, layers
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.mpu.head_loss import logit_blocks
from megazero.pipeline.measured import MeasuredCase, UnitBytes, measured
from megazero.program.instruction import Instruction, Kind, Op


@dataclass(frozen=True)
class ActivationPlan:
    """The sizes of a run's activations on one rank. The bytes of each kind of unit are measured once.

    bodies  by block the body that computes its attention in training: `fused_ops.attention.selection.choose`
    kind    of device: cpu or cuda
    """

    run: Run
    bodies: tuple[Body, ...]
    kind: str = "cpu"
    _measured: dict[tuple[StageSpec, str, bool], UnitBytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def chunks(self) -> dict[object, ChunkBytes]:
        """By what tells chunks apart, those that `chunk_bytes` has made."""
        return {}

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """By block the number of the first block that computes the same."""
        first = dict[Layer, int]()
        return tuple(first.setdefault(layer, number) for number, layer in enumerate(layers(self.run.model)))

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two units, and of a message between stages."""
        return self.block(0).output

    def block(self, number: int, recompute: str = NONE) -> UnitBytes:
        """The bytes of the block with this number. recompute: what backward computes again of it."""
        first = self.first_equal[number]
        # the gradient of its input is not wanted behind an embedding that is not trained
        graded = number > 0 or self.run.lora.lora_rank is None
        return self._unit(StageSpec(range(first, first + 1), False, False), recompute, graded=graded)

    def units(self, spec: StageSpec, table: RecomputeTable) -> tuple[UnitBytes, ...]:
        """The bytes of the units of a chunk in forward order, by a table of what backward computes again."""
        return (
            *[self._unit(StageSpec(range(0), True, False), graded=False)] * spec.has_embedding,
            *(self.block(number, table[number]) for number in spec.blocks),
            *[self._unit(StageSpec(range(0), False, True))] * spec.has_head,
        )

    @property
    def logits(self) -> int:
        """Bytes of the largest block of logits. On a CPU they are beside those of the head, and this memory is kept
        from step to step.
        """
        model, tp, dtype = self.run.model, self.run.parallel.tp, compute_dtype(self.run.optimizer.precision)
        row_bytes = padded_vocab(model, tp) // tp * dtype.itemsize
        last = logit_blocks(model.seq_length * self.run.schedule.micro_batch_size, row_bytes, self.kind)[-1]
        return (last.stop - last.start) * row_bytes

    def _unit(self, spec: StageSpec, recompute: str = NONE, *, graded: bool = True) -> UnitBytes:
        """The bytes of a unit, as of `MeasuredCase`."""
        key = spec, recompute, graded
        if key not in self._measured:
            body = self.bodies[spec.blocks.start]
            self._measured[key] = measured(MeasuredCase(self.run, body, self.kind, spec, recompute, graded))
        return self._measured[key]


@dataclass(frozen=True)
class ChunkGroup:
    """How a chunk is computed in vertical order.

    micro_batches  of the largest group
    turns_back     whether a group's backward follows its forward at once, so that each micro-batch does both of the
                   head one after the other
    stays          whether what the chunk makes is for a chunk of the same rank, and waits for the rest of the group
    """

    micro_batches: int
    turns_back: bool = False
    stays: bool = False


@dataclass(frozen=True)
class ChunkBytes:
    """The activations of a chunk for one micro-batch, whose units are one graph; in vertical order for a group of
    micro-batches that pass its units together (`passes.vertical`).

    In the row of a unit there is what the units before it keep of the whole group. Of each micro-batch that has passed
    the unit there is what it keeps, and the hidden states behind it; of each other one the hidden states in front.

    units     in forward order
    entering  bytes of the hidden states that it begins with; 0 for the chunk with the embedding
    group     how it is computed in vertical order; None: in horizontal order
    """

    units: tuple[UnitBytes, ...]
    entering: int
    group: ChunkGroup | None = None

    @cached_property
    def kept(self) -> int:
        """From the end of forward to the start of backward."""
        return self._together * sum(unit.saved for unit in self.units)

    @cached_property
    def deferred(self) -> int:
        """From the input's half of a split backward to the weights' half."""
        return self._together * sum(unit.deferred for unit in self.units)

    @cached_property
    def forward(self) -> list[int]:
        """The most that forward holds while it works on each unit."""
        return [
            before + (self._together - 1) * max(passed, entering) + entering + unit.forward
            for unit, before, entering, passed in self._rows()
        ]

    @cached_property
    def backward(self) -> list[int]:
        """The same of backward. The gradient of the output of a graph lives to the graph's end."""
        gradients = [unit.output for unit in self.units]
        if self.group is None:
            gradients[:-1] = (gradient + gradients[-1] for gradient in gradients[:-1])
        return [
            before + (self._together - 1) * passed + unit.input + unit.backward + gradient
            for (unit, before, _, passed), gradient in zip(self._rows(), gradients, strict=True)
        ]

    @cached_property
    def most_forward(self) -> int:
        """The most that forward holds."""
        return max(self.forward)

    @cached_property
    def most_backward(self) -> int:
        return max(self.backward)

    @property
    def _together(self) -> int:
        return 1 if self.group is None else self.group.micro_batches

    def _rows(self) -> Iterator[tuple[UnitBytes, int, int, int]]:
        """Each unit with bytes: what the units before it keep, its input in forward, and what there is of each other
        micro-batch that has passed it in forward, and not yet in backward.
        """
        before, entering = 0, self.entering
        for unit in self.units[:-1]:
            yield unit, before, entering, unit.saved + unit.output
            before += self._together * unit.saved
            entering = unit.output
        top, group = self.units[-1], self.group
        if group is not None and group.turns_back:
            yield top, before, entering, entering  # the gradient of the head's input, as large as that
        else:
            yield top, before, entering, top.saved + top.output * (group is not None and group.stays)


def chunk_bytes(
    plan: ActivationPlan, spec: StageSpec, table: RecomputeTable, group: ChunkGroup | None = None
) -> ChunkBytes:
    """The activations of the chunk `spec` under a table of what is computed again. group: in vertical order."""
    units = tuple((plan.first_equal[number], table[number], number == 0) for number in spec.blocks)
    key = units, spec.has_embedding, spec.has_head, group
    if key not in plan.chunks:
        entering = 0 if spec.has_embedding else plan.hidden_bytes
        plan.chunks[key] = ChunkBytes(plan.units(spec, table), entering, group)
    return plan.chunks[key]


@dataclass(frozen=True)
class Moment:
    """A computation of a stage's list, and what lives beside it.

    op    of the computation
    chunk the stage's own number of its chunk
    live  for each chunk, the micro-batches whose activations are kept, those of a backward itself included
    late  for each chunk, the micro-batches that wait for the weights' half of their backward
    """

    op: Kind
    chunk: int
    live: tuple[int, ...]
    late: tuple[int, ...]


_PASSES: Mapping[Kind, tuple[int, int]] = MappingProxyType(
    {Op.FORWARD: (1, 0), Op.BACKWARD: (-1, 0), Op.BACKWARD_INPUT: (-1, 1), Op.BACKWARD_WEIGHT: (0, -1)}
)
"""What a computation adds to `Moment.live`, and to `Moment.late`."""


def moments(instructions: Sequence[Instruction], chunks: int) -> list[Moment]:
    """The computations of a list, each kind of moment once. A pass without backward keeps nothing."""
    live, late, met = [0] * chunks, [0] * chunks, dict[tuple[Kind, int, tuple[int, ...], tuple[int, ...]], None]()
    for i in instructions:
        if i.op not in _PASSES:
            continue
        met[i.op, i.chunk, tuple(live), tuple(late)] = None
        begins, waits = _PASSES[i.op]
        live[i.chunk] += begins
        late[i.chunk] += waits
    return [Moment(*key) for key in met]


def binding(when: Sequence[Moment]) -> list[Moment]:
    """Those of these moments at which some choice may hold the most bytes: beside others of their kind more lives."""

    def covers(more: Moment, less: Moment) -> bool:
        return all(a >= b for a, b in zip(more.live + more.late, less.live + less.late, strict=True))

    of_kinds: dict[tuple[Kind, int], list[Moment]] = {}
    for moment in sorted(when, key=lambda moment: sum(moment.live + moment.late), reverse=True):
        known = of_kinds.setdefault((moment.op, moment.chunk), [])
        if not any(covers(more, moment) for more in known):
            known.append(moment)
    return [moment for of_kind in of_kinds.values() for moment in of_kind]


def places(moment: Moment, chunks: Sequence[ChunkBytes]) -> list[int]:
    """The bytes of a stage's chunks within a computation, while it works on each of its units."""
    beside, chunk = _beside(moment, chunks), chunks[moment.chunk]
    if moment.op is Op.BACKWARD_WEIGHT:
        return [beside]
    if moment.op is Op.FORWARD:
        return [beside + most for most in chunk.forward]
    return [beside - chunk.kept + most for most in chunk.backward]


def most_bytes(moment: Moment, chunks: Sequence[ChunkBytes]) -> int:
    """The most of `places`."""
    beside, chunk = _beside(moment, chunks), chunks[moment.chunk]
    if moment.op is Op.BACKWARD_WEIGHT:
        return beside
    if moment.op is Op.FORWARD:
        return beside + chunk.most_forward
    return beside - chunk.kept + chunk.most_backward


def _beside(moment: Moment, chunks: Sequence[ChunkBytes]) -> int:
    """The bytes of all that lives beside a computation, and of what it works with."""
    return sum(
        live * chunk.kept + late * chunk.deferred
        for chunk, live, late in zip(chunks, moment.live, moment.late, strict=True)
    )


def peak_bytes(instructions: Sequence[Instruction], chunks: Sequence[ChunkBytes]) -> int:
    """The most bytes of activations that a stage holds within its list, without messages on their way."""
    return max(most_bytes(moment, chunks) for moment in moments(instructions, len(chunks)))
