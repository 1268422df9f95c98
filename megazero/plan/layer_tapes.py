"""What the layers of a model save and make: the rows that each appends to a tape.

They are those of the compiled kernels, on a CPU or on CUDA. The plain torch bodies save the same, except `relu`, which
then saves its output only; what exists only within them (wider copies, blocks of rows) is not in the rows. Memory that
matrix libraries take for themselves, cuBLAS's workspace and oneDNN's scratch, is not either.

Of attention's bodies the C++ kernel keeps the projection, the context and one number for each query and head. So do
torch's and the package's flash attention and FlexAttention, which copy the queries once where query heads are not
evenly spaced (1 < g < n). The memory-efficient body keeps repeated keys and values. Products and softmax keep the
probabilities [b, n, s, s].

Shapes as in docs/architecture.md; N = s b tokens, of which a rank has N/t outside the tensor-parallel regions under
sequence parallelism. Of heads: n of this rank, g of them for keys and values, r = n/g, d their size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fused_ops.attention.selection import Body
from megazero.config.inventory import FP8_MULTIPLE
from megazero.plan.tape import NEW, PASS, SHARED, VIEW, Buffer, Tape

KEY = 8
"""Bytes of an int64: a key of a row's dropout, a token's id, a label."""


@dataclass(frozen=True)
class Widths:
    """Sizes of one rank's layers.

    tokens      N, of a micro-batch
    local       of them, those of this rank outside the tensor-parallel regions
    tp          number of tensor-parallel ranks
    item        bytes of an element of activations and parameters
    wide        bytes of an element of sums and statistics: 4, or 8 in fp64
    sequence_parallel  whether activations outside the tensor-parallel regions are cut along s
    """

    tokens: int
    local: int
    tp: int
    item: int
    wide: int
    sequence_parallel: bool

    @property
    def gathers(self) -> bool:
        """Whether a column-parallel layer gathers its input."""
        return self.sequence_parallel and self.tp > 1


@dataclass(frozen=True)
class Product:
    """A linear layer, or two of one input, on one rank.

    n, k     outputs and inputs
    bias     whether it has one
    trained  whether its weight is trained
    fp8      whether it runs in FP8
    recast   whether each FP8 product casts the weight for itself (ZeRO-3)
    """

    n: int
    k: int
    bias: bool
    trained: bool
    fp8: bool = False
    recast: bool = False


@dataclass(frozen=True)
class LowRankPair:
    """The adapter of a linear layer with n outputs and k inputs on one rank.

    rank    r
    p       dropout of its input
    slices  of a row-parallel layer: keys of a token, if there is dropout; None: a column-parallel layer, with one
    """

    n: int
    k: int
    rank: int
    p: float = 0.0
    slices: int | None = None

    @property
    def first(self) -> Product:
        return Product(self.rank, self.k, bias=False, trained=True)

    @property
    def second(self) -> Product:
        return Product(self.n, self.rank, bias=False, trained=True)


def norm(
    tape: Tape, w: Widths, x: Buffer, hidden: int, *, centred: bool, trained: bool, residual: Buffer | None = None
) -> tuple[Buffer, Buffer]:
    """(what is normalised, its normalisation): LayerNorm (centred) or RMSNorm of x, or of x + residual, which then have
    one gradient. Saves what is normalised and one or two statistics of each row.
    """
    total, y = x if residual is None else Buffer(x.nbytes), Buffer(x.nbytes)
    vectors = 2 if centred else 1
    rounded = vectors * hidden * w.item if w.item < w.wide else 0
    tape.op(
        (x,) if residual is None else (x, residual),
        (y,) if residual is None else (y, total),
        saves=(total, Buffer(vectors * w.local * w.wide)),
        gradient=SHARED,
        back=vectors * hidden * w.wide + rounded,
        trained=trained,
        vectors=(rounded or vectors * hidden * w.wide) if trained else 0,
    )
    return total, y


def column(tape: Tape, w: Widths, x: Buffer, layer: Product) -> Buffer:
    """A column-parallel layer: [N or N/t, k] -> [N, n]."""
    make = _fp8_product if layer.fp8 else _product
    return make(tape, w, x, layer, rows=w.local, gathers=w.gathers)


def adapter(tape: Tape, w: Widths, x: Buffer, y: Buffer, pair: LowRankPair) -> Buffer:
    """y plus the adapter's output for a layer's input x; of a row-parallel layer what is between A and B is summed."""
    is_row = pair.slices is not None
    rows = w.tokens if is_row else w.local
    with tape.holding(x, y):
        low = _product(tape, w, _dropped(tape, x, pair, rows), pair.first, rows=rows, gathers=False)
        low = _scaled(tape, _summed(tape, w, low, pair.rank) if is_row else low)
        up = _product(tape, w, low, pair.second, rows=w.local, gathers=w.gathers and not is_row)
        return added(tape, up, y)


def row(tape: Tape, w: Widths, x: Buffer, layer: Product) -> Buffer:
    """A row-parallel layer: [N, k] -> [N or N/t, n]. The bias follows the sum over tp."""
    make = _fp8_product if layer.fp8 else _product
    alone = replace(layer, bias=layer.bias and w.tp == 1)
    y = _summed(tape, w, make(tape, w, x, alone, rows=w.tokens, gathers=False), layer.n)
    if layer.bias and w.tp > 1:
        bias = Buffer(0)  # saved, but a parameter's bytes are not the unit's
        row = {"saves": (bias,), "trained": layer.trained, "back": layer.n * w.wide, "holds": layer.trained}
        y = tape.op((y,), y.nbytes, gradient=PASS, **row)
    return y


def _product(tape: Tape, w: Widths, x: Buffer, layer: Product, *, rows: int, gathers: bool) -> Buffer:
    """A product: saves its input if its weight is trained. Its whole input exists within it if it is gathered."""
    whole = w.tokens if gathers else rows
    gathered = whole * layer.k * w.item if gathers else 0
    late = Buffer(gathered) if gathers else x
    return tape.op(
        (x,),
        whole * layer.n * w.item,
        saves=(x,) if layer.trained else (),
        work=gathered,
        # Within backward: the input and the gradient of it as a whole, beside this rank's part of that.
        back=(gathered * (2 if layer.trained else 1)) or (layer.n * w.wide if layer.bias and layer.trained else 0),
        trained=layer.trained,
        late=(late,) if layer.trained else (),
        holds=layer.trained,
    )


def _fp8_product(tape: Tape, w: Widths, x: Buffer, layer: Product, *, rows: int, gathers: bool) -> Buffer:
    """An FP8 product: saves the FP8 copy of its input, one byte an element; all of it if the tokens are no multiple
    of 16. In a split backward the FP8 copy of its output's gradient waits, transposed.
    """
    whole = w.tokens if gathers else rows
    narrow = whole % FP8_MULTIPLE == 0
    copy = Buffer(rows * layer.k)
    kept = (copy if narrow else x,) if layer.trained else ()
    transposed = narrow and layer.trained
    values = rows * layer.k * (1 + (transposed and not gathers)) + (whole * layer.k if gathers else 0)
    of_gradient = Buffer(whole * layer.n)
    weight = 2 * layer.n * layer.k * layer.recast  # with its transpose
    late: tuple[Buffer, ...] = ()
    if layer.trained:
        late = (Buffer(whole * layer.k) if gathers else copy, of_gradient) if narrow else (x,)
    return tape.op(
        (x,),
        whole * layer.n * w.item,
        saves=(*kept, Buffer(4)),  # and 1 / scale
        work=values - (copy.nbytes if copy in kept else 0) + weight,
        back=whole * layer.n * (1 + transposed) + (2 * whole * layer.k if gathers else 0) + weight,
        trained=layer.trained,
        late=late,
        holds=layer.trained and not narrow,
        vectors=8 * transposed + layer.n * w.wide * (layer.bias and layer.trained),
    )


def _summed(tape: Tape, w: Widths, y: Buffer, width: int) -> Buffer:
    """The sum over tp of [N, width]: a tensor of its own, under sequence parallelism this rank's part."""
    return y if w.tp == 1 else tape.op((y,), w.local * width * w.item, gradient=SHARED if w.gathers else PASS)


def _scaled(tape: Tape, x: Buffer) -> Buffer:
    """x times a number, which autograd keeps in fp64."""
    return tape.op((x,), x.nbytes, saves=(Buffer(8),))


def _dropped(tape: Tape, x: Buffer, pair: LowRankPair, rows: int) -> Buffer:
    if pair.p == 0.0:
        return x
    # A row-parallel layer's input is dropped slice by slice, which a view shows.
    keys = Buffer(rows * (pair.slices or 1) * KEY)
    return tape.op((x,), x.nbytes, saves=(keys,), gradient=NEW if pair.slices is None else VIEW)


def dropout(tape: Tape, x: Buffer, keys: int, residual: Buffer | None = None) -> Buffer:
    """Dropout of x, and a residual added: saves a key for each row."""
    made = Buffer(keys * KEY)
    reads = (x,) if residual is None else (x, residual)
    return tape.op(reads, x.nbytes, saves=(made,), gradient=(NEW, PASS)[: len(reads)])


def added(tape: Tape, x: Buffer, residual: Buffer) -> Buffer:
    """x + residual: saves nothing, and hands its gradient on to both."""
    return tape.op((x, residual), x.nbytes, gradient=PASS)


def activated(tape: Tape, x: Buffer) -> Buffer:
    """gelu, gelu-tanh or relu: saves its input."""
    return tape.op((x,), x.nbytes, saves=(x,))


def halves(tape: Tape, both: Buffer) -> tuple[Buffer, Buffer]:
    """Gate and up of one product, as views. Their gradients are joined by a copy."""
    gate, up = (Buffer(both.nbytes // 2, base=both) for _ in range(2))
    tape.op((both,), (gate, up))
    return gate, up


def gated(tape: Tape, gate: Buffer, up: Buffer) -> Buffer:
    """silu(gate) * up: saves both."""
    return tape.op((gate, up), gate.nbytes, saves=(gate, up))


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
    unit = part.measure(core(part, w, inner, heads), consumes=True)
    # torch ends the second forward where all that backward needs is there: before the last product of `_softmax`.
    unneeded = 2 * unit.output if heads.body is Body.SOFTMAX else 0
    again = max(unit.forward - unneeded, unit.backward - mixed.nbytes - unit.output)
    return tape.op((mixed,), unit.output, saves=(mixed,), work=unit.forward - unit.output, back=again)


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
