"""Bytes of activations: what each unit of a run (embedding, block, head) keeps, and the most that it takes meanwhile.

It is arithmetic over a run and the body that computes its attention. Every unit is a tape: the model's forward again,
with tensors that have sizes only. `plan.layer_tapes` says what each layer saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fused_ops.attention.selection import Body
from megazero.config.derive import (
    FULL,
    NONE,
    SELECTIVE,
    gathers_parameters,
    head_dim,
    padded_vocab,
    position_rows,
    query_groups,
)
from megazero.config.dtypes import compute_dtype
from megazero.config.inventory import DOWN, GATE, OUTPUT, QKV, UP, block_layers, linears
from megazero.config.schema import Run
from megazero.mpu.head_loss import BLOCK_BYTES, LEAST_ROWS
from megazero.mpu.lora import low_rank
from megazero.plan.layer_tapes import (
    KEY,
    Heads,
    LowRankPair,
    Product,
    Widths,
    activated,
    added,
    attention,
    column,
    column_adapter,
    dropout,
    gated,
    halves,
    norm,
    norm_of_sum,
    row,
    row_adapter,
)
from megazero.plan.tape import NEW, PASS, Buffer, Tape, UnitBytes


@dataclass(frozen=True)
class ActivationPlan:
    """The sizes of a run's activations on one rank, from which `embedding`, `block` and `head` compute bytes.

    body  the body that computes attention in training: `fused_ops.attention.selection.choose`
    kind  of device: cpu or cuda
    """

    run: Run
    body: Body
    kind: str = "cpu"
    _known: dict[tuple[object, ...], UnitBytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _once(self, which: tuple[object, ...], measure: Callable[[], UnitBytes]) -> UnitBytes:
        """The bytes of this unit, computed when they are asked for first."""
        if which not in self._known:
            self._known[which] = measure()
        return self._known[which]

    @property
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

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained; else only adapters are."""
        return self.run.lora.lora_rank is None

    def _product(self, name: str) -> Product:
        """A linear layer of a block; gate and up of a gated feed-forward part are one."""
        run, tp = self.run, self.run.parallel.tp
        (layer,) = [layer for layer in block_layers(run.model, tp) if layer.name == name]
        bias = next(linear.bias for linear in linears(run.model) if linear.name == name)
        fp8 = run.optimizer.fp8 != "off" and layer.fits
        return Product(layer.n, layer.k, bias, self.trains_all, fp8=fp8, recast=gathers_parameters(run))

    def _adapted(self, tape: Tape, name: str, x: Buffer, y: Buffer) -> Buffer:
        """y plus the output of the layer's adapter for x, if it has one."""
        run, tp = self.run, self.run.parallel.tp
        adapters = low_rank(run.lora, run.model)
        if adapters is None or not adapters.adapts(name):
            return y
        linear = next(linear for linear in linears(run.model) if linear.name == name)
        pair = LowRankPair(*linear.on_rank(tp), adapters.rank, adapters.dropout)
        if linear.tp_axis == 0:
            return column_adapter(tape, self.widths, x, y, pair)
        return row_adapter(tape, self.widths, x, y, replace(pair, slices=adapters.slices // tp))

    def _column(self, tape: Tape, name: str, x: Buffer) -> Buffer:
        return self._adapted(tape, name, x, column(tape, self.widths, x, self._product(name)))

    def _row(self, tape: Tape, name: str, x: Buffer) -> Buffer:
        return self._adapted(tape, name, x, row(tape, self.widths, x, self._product(name)))

    def embedding(self) -> UnitBytes:
        """The bytes of the embedding."""
        return self._once(("embedding",), self._embedding)

    def _embedding(self) -> UnitBytes:
        model, w, trained = self.run.model, self.widths, self.trains_all
        hidden = model.hidden_size
        tape = Tape(Buffer(0))
        # Within it: the ids in the order of the hidden states.
        ids = {"saves": self._ids(w.tokens), "work": w.tokens * KEY, "back": w.tokens * KEY}
        x = tape.op((), w.tokens * hidden * w.item, trained=trained, **ids)
        if w.tp > 1:
            with tape.holding(x):
                x = tape.op((x,), x.nbytes, saves=(Buffer(w.tokens),))
            x = tape.op((x,), self.hidden_bytes, gradient=NEW if w.gathers else PASS)
        if model.position_embedding == "learned":
            x = self._positions(tape, x)
        if model.embedding_layernorm:
            x = self._norm(tape, x)
        if model.hidden_dropout:
            x = dropout(tape, x, w.local)
        return tape.measure(x)

    def _ids(self, tokens: int) -> tuple[Buffer, ...]:
        """Ids of this rank's part of the vocabulary. On one rank they are the batch's own."""
        return (Buffer(tokens * KEY),) if self.widths.tp > 1 else ()

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

    def block(self, recompute: str = NONE, *, graded: bool = True) -> UnitBytes:
        """The bytes of a block. graded: whether its input needs a gradient; not so after a frozen embedding."""
        return self._once((recompute, graded), lambda: self._block(recompute, graded=graded))

    def _block(self, recompute: str, *, graded: bool) -> UnitBytes:
        source = Buffer(self.hidden_bytes)
        tape = Tape(source, {source} if graded else set())
        x = self._attention(tape, source, selective=recompute == SELECTIVE)
        model, w = self.run.model, self.widths
        with tape.holding(x):
            hidden, normalised = norm_of_sum(
                tape, w, x, source, model.hidden_size, centred=model.norm == "layernorm", trained=self.trains_all
            )
            y = self._mlp(tape, normalised)
            with tape.holding(normalised, y):
                out = dropout(tape, y, w.local, hidden) if model.hidden_dropout else added(tape, y, hidden)
        part = self.input_part if self.run.parallel.shard_recompute_inputs else None
        return tape.measure(out, keeps=recompute != FULL, part=part)

    def _attention(self, tape: Tape, source: Buffer, *, selective: bool) -> Buffer:
        model, w = self.run.model, self.widths
        normalised = self._norm(tape, source)
        mixed = self._column(tape, QKV, normalised)
        if model.position_embedding == "rotary":
            mixed = tape.op((mixed,), mixed.nbytes)
        groups, repeats = query_groups(model), model.num_attention_heads // query_groups(model)
        shape = model.seq_length, self.run.schedule.micro_batch_size, groups // w.tp, repeats, head_dim(model)
        heads = Heads(*shape, self.body, model.attention_dropout > 0)
        context = attention(tape, w, mixed, heads, selective=selective)
        with tape.holding(normalised, mixed, context):
            x = self._row(tape, OUTPUT, context)
        return dropout(tape, x, w.local) if model.hidden_dropout else x

    def _mlp(self, tape: Tape, x: Buffer) -> Buffer:
        if self.run.model.activation == "swiglu":
            gate, up = halves(tape, column(tape, self.widths, x, self._product(GATE)))
            gate = self._adapted(tape, GATE, x, gate)
            with tape.holding(gate):
                up = self._adapted(tape, UP, x, up)
            y = gated(tape, gate, up)
        else:
            y = activated(tape, self._column(tape, UP, x))
        with tape.holding(x, y):
            return self._row(tape, DOWN, y)

    def head(self) -> UnitBytes:
        """The bytes of the head and the loss. On a CPU `logits` are beside them, in memory of their own."""
        return self._once(("head",), self._head)

    def _head(self) -> UnitBytes:
        model, w = self.run.model, self.widths
        source = Buffer(self.hidden_bytes)
        tape = Tape(source, {source})
        y = self._norm(tape, source)
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

    def _norm(self, tape: Tape, x: Buffer) -> Buffer:
        model, w = self.run.model, self.widths
        centred = model.norm == "layernorm"
        return norm(tape, w, x, model.hidden_size, centred=centred, trained=self.trains_all, rows=w.local)
