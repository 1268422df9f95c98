"""Bytes of activations: what each unit of a run (embedding, block, head) keeps, and the most that it takes meanwhile;
those of a model chunk, and of a stage over its list of instructions.

It is arithmetic over a run and the body that computes its attention. Every unit is a tape: the model's forward again,
with tensors that have sizes only. `plan.layer_tapes` says what each layer saves.

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
from megazero.config.derive import (
    FULL,
    NONE,
    SELECTIVE,
    RecomputeTable,
    gathers_parameters,
    padded_vocab,
    position_rows,
)
from megazero.config.dtypes import compute_dtype
from megazero.config.inventory import DOWN, GATE, OUTPUT, QKV, TP_AXIS, UP, linears, products
from megazero.config.layers.kinds import Layer, layers
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.mpu.head_loss import BLOCK_BYTES, LEAST_ROWS
from megazero.mpu.lora import low_rank
from megazero.plan.layer_tapes import (
    KEY,
    Heads,
    LowRankPair,
    Product,
    Widths,
    activated,
    adapter,
    added,
    attention,
    column,
    dropout,
    gated,
    halves,
    norm,
    row,
)
from megazero.plan.tape import NEW, PASS, Buffer, Tape, UnitBytes
from megazero.program.instruction import Instruction, Kind, Op


@dataclass(frozen=True)
class ActivationPlan:
    """The sizes of a run's activations on one rank, from which the bytes of each unit are computed once.

    body  the body that computes attention in training: `fused_ops.attention.selection.choose`
    kind  of device: cpu or cuda
    """

    run: Run
    body: Body
    kind: str = "cpu"
    _blocks: dict[tuple[Layer, str, bool], UnitBytes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def widths(self) -> Widths:
        run, dtype = self.run, compute_dtype(self.run.optimizer.precision)
        tokens, tp = run.model.seq_length * run.schedule.micro_batch_size, run.parallel.tp
        local = tokens // tp if run.parallel.sequence_parallel else tokens
        return Widths(tokens, local, tp, dtype.itemsize, max(4, dtype.itemsize), run.parallel.sequence_parallel)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two units, and of a message between stages."""
        return self.widths.local * self.run.model.hidden_size * self.widths.item

    @property
    def input_part(self) -> int:
        """Bytes of a rank's part of a recomputed block's input (--shard-recompute-inputs), padding included."""
        return -(-self.hidden_bytes // (self.widths.item * self.widths.tp)) * self.widths.item

    def layers_of(self, spec: StageSpec) -> tuple[Layer, ...]:
        """What the blocks of a chunk compute."""
        return layers(self.run.model)[spec.blocks.start : spec.blocks.stop]

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained; else only adapters are."""
        return self.run.lora.lora_rank is None

    def _product(self, layer: Layer, name: str) -> Product:
        """A linear layer of a block; gate and up of a gated feed-forward part are one."""
        run, tp = self.run, self.run.parallel.tp
        (product,) = [product for product in products(layer, tp) if product.name == name]
        bias = next(linear.bias for linear in linears(layer) if linear.name == name)
        fp8 = run.optimizer.fp8 != "off" and product.fits
        return Product(product.n, product.k, bias, self.trains_all, fp8=fp8, recast=gathers_parameters(run))

    def _adapted(self, tape: Tape, layer: Layer, name: str, x: Buffer, y: Buffer) -> Buffer:
        """y plus the output of the layer's adapter for x, if it has one."""
        run, tp = self.run, self.run.parallel.tp
        adapters = low_rank(run.lora, run.model)
        if adapters is None or not adapters.adapts(name):
            return y
        linear = next(linear for linear in linears(layer) if linear.name == name)
        slices = None if linear.tp_axis == 0 else adapters.slices // tp
        pair = LowRankPair(*linear.on_rank(tp), adapters.rank, adapters.dropout, slices)
        return adapter(tape, self.widths, x, y, pair)

    def _linear(self, tape: Tape, layer: Layer, name: str, x: Buffer) -> Buffer:
        of_axis = column if TP_AXIS[name] == 0 else row
        return self._adapted(tape, layer, name, x, of_axis(tape, self.widths, x, self._product(layer, name)))

    @cached_property
    def embedding(self) -> UnitBytes:
        """The bytes of the embedding."""
        model, w, trained = self.run.model, self.widths, self.trains_all
        hidden = model.hidden_size
        tape = Tape(Buffer(0))
        # Saved: the ids in this rank's part of the vocabulary. On one rank they are the batch's own.
        saved = (Buffer(w.tokens * KEY),) if w.tp > 1 else ()
        # Within it: the ids in the order of the hidden states.
        ids = {"saves": saved, "work": w.tokens * KEY, "back": w.tokens * KEY}
        x = tape.op((), w.tokens * hidden * w.item, trained=trained, **ids)
        if w.tp > 1:
            with tape.holding(x):
                x = tape.op((x,), x.nbytes, saves=(Buffer(w.tokens),))
            x = tape.op((x,), self.hidden_bytes, gradient=NEW if w.gathers else PASS)
        if model.position_embedding == "learned":
            x = self._positions(tape, x)
        if model.embedding_layernorm:
            _, x = self._norm(tape, x)
        if model.hidden_dropout:
            x = dropout(tape, x, w.local)
        return tape.measure(x)

    def _positions(self, tape: Tape, x: Buffer) -> Buffer:
        """Learned positions. The gradient of their table is as large as the table."""
        model, w = self.run.model, self.widths
        table = position_rows(model) * model.hidden_size * w.item
        if model.document_mask:  # each token has a position of its own
            wide = w.item < w.wide  # 16-bit rows are summed apart, at most as many as the table has
            sums = min(w.local, position_rows(model)) * (model.hidden_size * (w.wide + w.item) + KEY) if wide else 0
            ids = {"saves": (Buffer(w.local * KEY),), "back": table + sums + 2 * w.local * KEY}
            vectors = tape.op((), x.nbytes, trained=self.trains_all, **ids)
            return tape.op((x, vectors), x.nbytes, gradient=PASS)
        summed = x.nbytes // self.run.schedule.micro_batch_size
        return tape.op((x,), x.nbytes, gradient=PASS, back=table + summed, trained=self.trains_all)

    def block(self, recompute: str = NONE, *, layer: Layer | None = None, graded: bool = True) -> UnitBytes:
        """The bytes of a block. layer: what it computes; None: what the first one does. graded: whether its input
        needs a gradient; not so after a frozen embedding.
        """
        layer = layers(self.run.model)[0] if layer is None else layer
        if (layer, recompute, graded) not in self._blocks:
            self._blocks[layer, recompute, graded] = self._block(layer, recompute, graded=graded)
        return self._blocks[layer, recompute, graded]

    def _block(self, layer: Layer, recompute: str, *, graded: bool) -> UnitBytes:
        source = Buffer(self.hidden_bytes)
        tape = Tape(source, {source} if graded else set())
        x = self._attention(tape, layer, source, selective=recompute == SELECTIVE)
        model, w = self.run.model, self.widths
        with tape.holding(x):
            hidden, normalised = self._norm(tape, x, source)
            y = self._mlp(tape, layer, normalised)
            with tape.holding(normalised, y):
                out = dropout(tape, y, w.local, hidden) if model.hidden_dropout else added(tape, y, hidden)
        part = self.input_part if self.run.parallel.shard_recompute_inputs else None
        return tape.measure(out, keeps=recompute != FULL, part=part)

    def _attention(self, tape: Tape, layer: Layer, source: Buffer, *, selective: bool) -> Buffer:
        model, w = self.run.model, self.widths
        _, normalised = self._norm(tape, source)
        mixed = self._linear(tape, layer, QKV, normalised)
        mixer = layer.mixer
        if mixer.rotary is not None:
            mixed = tape.op((mixed,), mixed.nbytes)
        repeats = mixer.heads // mixer.groups
        shape = model.seq_length, self.run.schedule.micro_batch_size, mixer.groups // w.tp, repeats, mixer.size
        heads = Heads(*shape, self.body, model.attention_dropout > 0)
        context = attention(tape, w, mixed, heads, selective=selective)
        with tape.holding(normalised, mixed, context):
            x = self._linear(tape, layer, OUTPUT, context)
        return dropout(tape, x, w.local) if model.hidden_dropout else x

    def _mlp(self, tape: Tape, layer: Layer, x: Buffer) -> Buffer:
        if layer.mlp.gated:
            gate, up = halves(tape, column(tape, self.widths, x, self._product(layer, GATE)))
            gate = self._adapted(tape, layer, GATE, x, gate)
            with tape.holding(gate):
                up = self._adapted(tape, layer, UP, x, up)
            y = gated(tape, gate, up)
        else:
            y = activated(tape, self._linear(tape, layer, UP, x))
        with tape.holding(x, y):
            return self._linear(tape, layer, DOWN, y)

    @cached_property
    def head(self) -> UnitBytes:
        """The bytes of the head and the loss. On a CPU `logits` are beside them, in memory of their own."""
        model, w = self.run.model, self.widths
        source = Buffer(self.hidden_bytes)
        tape = Tape(source, {source})
        _, y = self._norm(tape, source)
        whole = w.tokens * model.hidden_size * w.item
        x = y
        if w.gathers:
            x = tape.op((y,), whole)
        elif w.tp > 1:
            x = Buffer(whole, base=y)
            tape.op((y,), (x,))
        gradient = Buffer(whole)
        rows = self._logit_rows()
        # Within a block of rows: labels, targets, two numbers of each row, the input's gradient, and the logits.
        work = w.tokens * KEY + rows * (KEY + 2 * w.wide + model.hidden_size * w.item)
        work += self.logits if self.kind != "cpu" else 0
        with tape.holding(x):
            loss = tape.op((x,), w.wide, saves=(gradient,), gradient=gradient, work=work)
        return tape.measure(loss)

    def _logit_rows(self) -> int:
        """Rows of the largest block of logits: `mpu.head_loss`."""
        w = self.widths
        row_bytes = padded_vocab(self.run.model, w.tp) // w.tp * w.item
        most = max(LEAST_ROWS[self.kind], BLOCK_BYTES[self.kind] // row_bytes)
        return -(-w.tokens // -(-w.tokens // most))

    @property
    def logits(self) -> int:
        """Bytes of the largest block of logits. On a CPU this memory is kept from step to step."""
        w = self.widths
        return self._logit_rows() * padded_vocab(self.run.model, w.tp) // w.tp * w.item

    def _norm(self, tape: Tape, x: Buffer, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        hidden, centred, trained = self.run.model.hidden_size, self.run.model.norm == "layernorm", self.trains_all
        return norm(tape, self.widths, x, hidden, centred=centred, trained=trained, residual=residual)


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
