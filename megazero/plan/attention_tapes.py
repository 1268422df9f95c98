"""What each body of attention saves and makes: the rows that it appends to a tape.

The C++ kernel keeps the projection, the context and one number for each query and head. So do torch's and the package's
flash attention and FlexAttention, which copy the queries once where query heads are not evenly spaced (1 < g < n). The
memory-efficient body keeps repeated keys and values. Products and softmax keep the probabilities [b, n, s, s].

s sequence, b micro-batch, n heads, g key-value heads of this rank, r = n/g, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_ops.attention.selection import Body
from megazero.plan.layer_tapes import KEY, Widths
from megazero.plan.tape import Buffer, Tape


@dataclass(frozen=True)
class Heads:
    """Attention on one rank. dropout: whether probabilities are dropped."""

    length: int
    samples: int
    groups: int
    repeats: int
    size: int
    body: Body
    dropout: bool

    @property
    def queries(self) -> int:
        """Width of the context: n d."""
        return self.groups * self.repeats * self.size


def attention(tape: Tape, w: Widths, mixed: Buffer, heads: Heads, *, selective: bool) -> Buffer:
    """The context of the projection `mixed`. selective: backward computes it again, and only `mixed` is kept."""
    core = CORES[heads.body]
    if not selective:
        return core(tape, w, mixed, heads)
    inner = Buffer(mixed.nbytes)
    part = Tape(inner, {inner} if mixed in tape.graded else set())
    found = part.measure(core(part, w, inner, heads), consumes=True)
    # torch ends the second forward where all that backward needs is there: before the last product of `_softmax`.
    unneeded = 2 * found.output if heads.body is Body.SOFTMAX else 0
    again = max(found.forward - unneeded, found.backward - mixed.nbytes - found.output)
    return tape.op((mixed,), found.output, saves=(mixed,), work=found.forward - found.output, back=again)


def _kernel(tape: Tape, w: Widths, mixed: Buffer, heads: Heads) -> Buffer:
    context, norms = Buffer(w.tokens * heads.queries * w.item), Buffer(w.tokens * heads.groups * heads.repeats * 4)
    return tape.op((mixed,), (context,), saves=(mixed, context, norms))


def _flash(tape: Tape, w: Widths, mixed: Buffer, heads: Heads) -> Buffer:
    query, key, value = _split(tape, mixed, heads, copies=heads.groups > 1 and heads.repeats > 1)
    context = Buffer(w.tokens * heads.queries * w.item)
    norms = Buffer(w.tokens * heads.groups * heads.repeats * w.wide)
    return tape.op((query, key, value), (context,), saves=(query, key, value, context, norms))


def _efficient(tape: Tape, w: Widths, mixed: Buffer, heads: Heads) -> Buffer:
    query, key, value = _split(tape, mixed, heads, copies=heads.groups > 1 and heads.repeats > 1)
    if heads.repeats > 1:
        key, value = (tape.op((part,), query.nbytes) for part in (key, value))
    context = Buffer(w.tokens * heads.queries * w.item)
    rows = -(-heads.length // 32) * 32  # the kernel rounds up the length of its sums
    norms = Buffer(heads.samples * heads.groups * heads.repeats * rows * 4)
    tape.op((query, key, value), (context,), saves=(query, key, value, context, norms))
    return context if heads.samples == 1 else tape.op((context,), context.nbytes)


def _softmax(tape: Tape, w: Widths, mixed: Buffer, heads: Heads) -> Buffer:
    query, key, value = _split(tape, mixed, heads, copies=heads.repeats > 1)
    rows = w.tokens * heads.groups * heads.repeats
    scores = tape.op((query, key), rows * heads.length * w.item, saves=(query, key))
    # The probabilities are written over the scores, and their gradient over them.
    probabilities = Buffer(scores.nbytes, base=scores)
    tape.op((scores,), (probabilities,), saves=(probabilities,), gradient=scores)
    if heads.dropout:
        probabilities = tape.op((probabilities,), probabilities.nbytes, saves=(Buffer(rows * KEY),))
    with tape.holding(query, scores):
        context = tape.op((probabilities, value), w.tokens * heads.queries * w.item, saves=(probabilities, value))
    return tape.op((context,), context.nbytes)  # from the order of the products to [s, b, n d]


def _split(tape: Tape, mixed: Buffer, heads: Heads, *, copies: bool) -> tuple[Buffer, Buffer, Buffer]:
    """Query, key and value: views of the projection, or a copy of the query. Their gradients are joined by a copy."""
    pair = mixed.nbytes // (heads.repeats + 2)
    key, value = (Buffer(pair, base=mixed) for _ in range(2))
    query = Buffer(mixed.nbytes - 2 * pair, base=None if copies else mixed)
    tape.op((mixed,), (query, key, value))
    return query, key, value


CORES = {
    Body.KERNEL: _kernel,
    Body.FLASH: _flash,
    Body.PACKAGE: _flash,
    Body.FLEX: _flash,
    Body.EFFICIENT: _efficient,
    Body.SOFTMAX: _softmax,
}
