"""Bytes of activations: what each unit of a run (embedding, block, head) keeps, and the most that it takes meanwhile;
those of a model chunk, and of a stage over its list of instructions.

Each kind of unit is measured on the meta device (`pipeline.measured`). All else is arithmetic.

A computation works on units of a chunk as one graph. An input of a unit is kept until backward only as far as the unit
needs it (`UnitBytes.input`). In vertical order a computation of a schedule is that of a whole group of micro-batches
(`GroupBytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
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
    """The sizes of a run's activations on one rank. The bytes of each unit are measured once.

    body    the body that computes attention in training: `fused_ops.attention.selection.choose`
    kind    of device: cpu or cuda
    others  kinds of layers whose attention another body computes, each with this body
    """

    run: Run
    body: Body
    kind: str = "cpu"
    others: tuple[tuple[Layer, Body], ...] = ()
    _blocks: dict[tuple[Layer, str, bool], UnitBytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two units, and of a message between stages."""
        return self.block().output

    def layers_of(self, spec: StageSpec) -> tuple[Layer, ...]:
        """What the blocks of a chunk compute."""
        return layers(self.run.model)[spec.blocks.start : spec.blocks.stop]

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained; else only adapters are."""
        return self.run.lora.lora_rank is None

    @cached_property
    def embedding(self) -> UnitBytes:
        """The bytes of the embedding."""
        return self._measured(StageSpec(range(0), True, False), NONE, graded=False)

    def block(self, recompute: str = NONE, *, layer: Layer | None = None, graded: bool = True) -> UnitBytes:
        """The bytes of a block. layer: what it computes; None: what the first one does. graded: whether its input
        needs a gradient; not so after a frozen embedding.
        """
        every = layers(self.run.model)
        layer = every[0] if layer is None else layer
        if (layer, recompute, graded) not in self._blocks:
            number, body = every.index(layer), dict(self.others).get(layer, self.body)
            spec = StageSpec(range(number, number + 1), False, False)
            unit = measured(MeasuredCase(self.run, body, self.kind, spec, recompute, graded))
            self._blocks[layer, recompute, graded] = unit
        return self._blocks[layer, recompute, graded]

    @cached_property
    def head(self) -> UnitBytes:
        """The bytes of the head and the loss. On a CPU `logits` are beside them, in memory of their own."""
        return self._measured(StageSpec(range(0), False, True), NONE, graded=True)

    @property
    def logits(self) -> int:
        """Bytes of the largest block of logits. On a CPU this memory is kept from step to step."""
        model, tp, dtype = self.run.model, self.run.parallel.tp, compute_dtype(self.run.optimizer.precision)
        row_bytes = padded_vocab(model, tp) // tp * dtype.itemsize
        last = logit_blocks(model.seq_length * self.run.schedule.micro_batch_size, row_bytes, self.kind)[-1]
        return (last.stop - last.start) * row_bytes

    def _measured(self, spec: StageSpec, recompute: str, *, graded: bool) -> UnitBytes:
        return measured(MeasuredCase(self.run, self.body, self.kind, spec, recompute, graded))


Runs = tuple[tuple[UnitBytes, int], ...]
"""Equal units that follow each other, and how many there are."""


@dataclass(frozen=True)
class ChunkBytes:
    """The activations of a chunk for one micro-batch.

    runs      its units in forward order
    entering  bytes of the hidden states that it begins with; 0 for the chunk with the embedding
    """

    runs: Runs
    entering: int

    @property
    def kept(self) -> int:
        """From the end of forward to the start of backward."""
        return sum((unit.kept + unit.input) * count for unit, count in self.runs)

    @property
    def forward(self) -> int:
        """The most that forward holds."""
        return max((last.before + last.entering + last.unit.forward for last in self._walk()), default=0)

    @property
    def backward(self) -> int:
        """The most that backward holds, the gradient of the chunk's output included, which lives to its end."""
        held = [(last.before + last.unit.input + last.unit.backward, last.unit.output) for last in self._walk()]
        return max((own + output + (held[-1][1] if i < len(held) - 1 else 0) for i, (own, output) in enumerate(held)))

    @property
    def deferred(self) -> int:
        """From the input's half of a split backward to the weights' half."""
        return sum(unit.deferred * count for unit, count in self.runs)

    def _walk(self) -> Iterator[_Last]:
        """The last unit of each run. It holds most of its run, since all before it have kept theirs."""
        before, entering = 0, self.entering
        for unit, count in self.runs:
            if count > 1:
                before += (count - 1) * (unit.kept + unit.input)
                entering = unit.output
            yield _Last(unit, before, entering)
            before += unit.kept + unit.input
            entering = unit.output


@dataclass(frozen=True)
class _Last:
    """The last unit of a run.

    before    bytes that the units before it keep
    entering  of its input while its forward runs
    """

    unit: UnitBytes
    before: int
    entering: int


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
class GroupBytes(ChunkBytes):
    """The activations of a chunk for a group of micro-batches that pass its units together (`passes.vertical`).

    In the row of a unit there is what the units before it keep of the whole group. Of each micro-batch that has passed
    the unit there is what it keeps, and the hidden states behind it; of each other one the hidden states in front.
    """

    group: ChunkGroup

    @property
    def kept(self) -> int:
        return self.group.micro_batches * super().kept

    @property
    def deferred(self) -> int:
        return self.group.micro_batches * super().deferred

    @property
    def forward(self) -> int:
        return max(
            self._beside(last, max(passed, last.entering)) + last.entering + last.unit.forward
            for last, passed in self._rows()
        )

    @property
    def backward(self) -> int:
        return max(
            self._beside(last, passed) + last.unit.input + last.unit.backward + last.unit.output
            for last, passed in self._rows()
        )

    def _beside(self, last: _Last, each: int) -> int:
        """Bytes beside a micro-batch in the row of a unit, where every other one has `each` from there on."""
        return self.group.micro_batches * last.before + (self.group.micro_batches - 1) * each

    def _rows(self) -> Iterator[tuple[_Last, int]]:
        """Units whose rows may hold most, each with the bytes of a micro-batch that has passed it in forward, and not
        yet in backward: the last unit of each run, and the one before the chunk's last.
        """
        *others, top = self._walk()
        unit, count = self.runs[-1]
        if count > 1:
            others.append(_Last(unit, top.before - unit.kept - unit.input, top.entering))
        for last in others:
            yield last, last.unit.kept + last.unit.input + last.unit.output
        if self.group.turns_back:
            yield top, top.entering  # the gradient of the head's input, as large as that
        else:
            yield top, top.unit.kept + top.unit.input + top.unit.output * self.group.stays


def chunk_bytes(
    plan: ActivationPlan, spec: StageSpec, table: RecomputeTable, group: ChunkGroup | None = None
) -> ChunkBytes:
    """The activations of the chunk `spec` under a table of what is computed again. group: in vertical order."""
    return of_units(plan, spec, [(table[number], 1) for number in spec.blocks], group)


def of_units(
    plan: ActivationPlan, spec: StageSpec, again: Sequence[tuple[str, int]], group: ChunkGroup | None
) -> ChunkBytes:
    """The chunk of whose blocks this is computed again: runs of (what, of how many). group: as above."""
    kinds = list(_beside(plan.layers_of(spec), again))
    runs = [(plan.block(kind, layer=layer), count) for (layer, kind), count in kinds]
    if runs and spec.has_embedding and not plan.trains_all:  # no gradient comes out of a frozen embedding
        (layer, kind), count = kinds[0]
        runs[:1] = [(plan.block(kind, layer=layer, graded=False), 1), (runs[0][0], count - 1)]
    if spec.has_embedding:
        runs.insert(0, (plan.embedding, 1))
    if spec.has_head:
        runs.append((plan.head, 1))
    entering = 0 if spec.has_embedding else plan.hidden_bytes
    equal = tuple(run for run in runs if run[1])
    return ChunkBytes(equal, entering) if group is None else GroupBytes(equal, entering, group)


def _beside(here: Sequence[Layer], again: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[Layer, str], int]]:
    """Runs of blocks that are equal in both: (layer, what is computed again), and how many."""
    start = 0
    for kind, count in again:
        for layer, equal in groupby(here[start : start + count]):
            yield (layer, kind), len(list(equal))
        start += count


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
    live, late, met = [0] * chunks, [0] * chunks, dict[Moment, None]()
    for i in instructions:
        if not i.is_compute:
            continue
        met[Moment(i.op, i.chunk, tuple(live), tuple(late))] = None
        begins, waits = _PASSES[i.op]
        live[i.chunk] += begins
        late[i.chunk] += waits
    return list(met)


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


def share(moment: Moment, number: int, chunk: ChunkBytes) -> int:
    """The most bytes of one of a stage's chunks within a computation."""
    kept = moment.live[number] * chunk.kept + moment.late[number] * chunk.deferred
    if moment.chunk != number or moment.op is Op.BACKWARD_WEIGHT:
        return kept
    return kept + (chunk.forward if moment.op is Op.FORWARD else chunk.backward - chunk.kept)


def peak_bytes(instructions: Sequence[Instruction], chunks: Sequence[ChunkBytes]) -> int:
    """The most bytes of activations that a stage holds within its list, without messages on their way."""
    when = moments(instructions, len(chunks))
    return max(sum(share(moment, i, chunk) for i, chunk in enumerate(chunks)) for moment in when)
