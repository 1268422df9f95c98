"""A tape: the operations of one unit in forward order, and the bytes that forward, backward and the time between hold.

An operation is a row: what it reads and makes, what it saves for its backward, and what its backward makes. `Tape.op`
appends one. The rules by which memory is freed are autograd's and Python's, and stand here once:

- A tensor lives while an operation that has not run its backward saves it, and while code holds it: until the last
  operation that reads it, or to the end of the function whose local name it is (`holding`).
- An operation is recorded if an input needs a gradient or a parameter of it is trained. Else it saves nothing.
- Backward runs recorded operations in reverse. It frees what an operation saved, and the gradients of what it made,
  after it. Gradients of a tensor that is read twice are added in place, unless the first is a view or somebody else
  holds it too.

A unit's input, its output's gradient, and parameters with their gradients belong to others and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class Buffer:
    """A tensor of the unit. base: the tensor of whose memory it is a view; None: it has its own."""

    nbytes: int
    base: Buffer | None = None

    @property
    def memory(self) -> Buffer:
        return self if self.base is None else self.base.memory


PASS, SHARED, NEW, VIEW = "pass", "shared", "new", "view"
"""How an operation makes the gradients of its inputs: it hands on that of its output, makes one tensor for all of them,
one for each, or one for each of which autograd gets a view.
"""


@dataclass(frozen=True, eq=False)
class TapeEntry:
    """One operation.

    reads     inputs that may need a gradient
    makes     outputs
    saves     what its backward reads, inputs and outputs of it among them
    gradient  PASS, SHARED, NEW or VIEW; a Buffer: it is written over this tensor, which the operation saves; several:
              one of them for each input
    work      bytes that exist only within its forward, beside what it makes
    back      bytes that exist only within its backward, beside the gradients of its inputs
    trained   whether it has a trained parameter
    late      what the gradients of its weights are made from later, in a split backward, beside its output's gradient
    holds     whether a split backward keeps its output's gradient too
    vectors   bytes of gradients that a split backward keeps as they are
    """

    reads: tuple[Buffer, ...]
    makes: tuple[Buffer, ...]
    saves: tuple[Buffer, ...] = ()
    gradient: str | Buffer | tuple[str, ...] = NEW
    work: int = 0
    back: int = 0
    trained: bool = False
    late: tuple[Buffer, ...] = ()
    holds: bool = False
    vectors: int = 0


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit for one micro-batch.

    input     of its input that the unit keeps until backward: all, a tp rank's part, or 0
    kept      all else that it keeps from its forward to its backward
    output    of what it makes
    forward   the most that its forward holds, its output included and its input not
    backward  the most that its backward holds, what it keeps and its input's gradient included, and its output's
              gradient and its input not
    deferred  what it keeps from the input's half of a split backward to the weights' half, its input and its output's
              gradient included
    """

    input: int
    kept: int
    output: int
    forward: int
    backward: int
    deferred: int


@dataclass(eq=False)
class Tape:
    """The operations of a unit with the input `source`. graded: the tensors that need a gradient."""

    source: Buffer
    graded: set[Buffer] = field(default_factory=set)
    ops: list[tuple[TapeEntry, bool]] = field(default_factory=list)
    held: dict[Buffer, int] = field(default_factory=dict)

    def op(self, reads: Iterable[Buffer], makes: int | Iterable[Buffer], **row: object) -> Buffer:
        """Append an operation and return its first output. makes: the bytes of its output, or its outputs."""
        read = tuple(reads)
        made = (Buffer(makes),) if isinstance(makes, int) else tuple(makes)
        op = TapeEntry(read, made, **row)  # type: ignore[arg-type]
        recorded = op.trained or any(buffer in self.graded for buffer in read)
        if recorded:
            self.graded.update(made)
        self.ops.append((op, recorded))
        self._hold(*read, *made)
        return made[0]

    @contextmanager
    def holding(self, *buffers: Buffer) -> Iterator[None]:
        """Within the block, code holds these tensors: they are a function's arguments or local names."""
        yield
        self._hold(*buffers)

    def _hold(self, *buffers: Buffer) -> None:
        """Code holds these tensors until the last operation so far, which is later than any that held them before."""
        self.held |= {buffer.memory: len(self.ops) - 1 for buffer in buffers}

    def measure(
        self, output: Buffer, *, keeps: bool = True, consumes: bool = False, part: int | None = None
    ) -> UnitBytes:
        """What the unit takes.

        keeps     False: its forward keeps nothing but its input, and backward runs it again
        consumes  whether backward's bytes count the output's gradient too, until backward has used it
        part      bytes of its input that are kept instead of all of it, when it keeps nothing else: forward copies
                  them, and backward has the whole until nothing needs it
        """
        alive, forward = self._forward(output, keeps=True)
        kept = _total(alive - {self.source, output})
        input_bytes = self.source.nbytes if self.source in alive else 0
        backward, deferred = self._backward(alive - {output}, output, consumes)
        if keeps:
            return UnitBytes(input_bytes, kept, output.nbytes, forward, backward, deferred)
        # The second forward ends with the last operation that saves something.
        saving = max((number for number, (op, recorded) in enumerate(self.ops) if recorded and op.saves), default=-1)
        _, again = self._forward(output, keeps=True, stop=saving + 1)
        _, forward = self._forward(output, keeps=False)
        if part is None:
            return UnitBytes(self.source.nbytes, 0, output.nbytes, forward, max(again, backward), deferred)
        backward, _ = self._backward(alive - {output}, output, consumes, counted=alive & {self.source})
        again = max(again + self.source.nbytes, backward)
        return UnitBytes(part, 0, output.nbytes, forward + part, again, deferred)

    def _forward(self, output: Buffer, *, keeps: bool, stop: int | None = None) -> tuple[set[Buffer], int]:
        """(tensors alive after forward, the most bytes within it). stop: only the operations before this one."""
        alive, saved, most = {self.source}, set[Buffer](), 0
        for index, (op, recorded) in enumerate(self.ops[:stop]):
            new = {buffer.memory for buffer in (*op.makes, *op.saves)}
            alive |= new
            most = max(most, _total(alive - {self.source}) + op.work)
            if recorded and keeps:
                saved |= {buffer.memory for buffer in op.saves}
            alive = {b for b in alive if b in saved or b in (output, self.source) or self.held.get(b, -1) > index}
        return (saved | {output}), most

    def _backward(
        self, alive: set[Buffer], output: Buffer, consumes: bool, counted: Collection[Buffer] = ()
    ) -> tuple[int, int]:
        """(the most bytes within backward, those that a split backward leaves).

        alive: what forward kept. counted: the input, if it is counted too.
        """
        users = Counter(memory for op, recorded in self.ops if recorded for memory in {b.memory for b in op.saves})
        memory = Counter({buffer: 1 for buffer in alive if buffer is not self.source or buffer in counted})
        own = Buffer(output.nbytes)  # the output's gradient, which its maker holds
        memory[own] += consumes
        gradients = {output: own}
        uncounted = set() if consumes else {own}
        late: set[Buffer] = set()
        vectors = most = 0
        for op, recorded in reversed(self.ops):
            if not recorded:
                continue
            incoming = [gradients.pop(made) for made in op.makes if made in gradients]
            made = self._gradients_of(op, incoming[0])
            for gradient in made.values():
                memory[gradient.memory] += 1
            most = max(most, _total(memory.keys() - uncounted) + op.back)
            vectors += op.vectors
            late |= {buffer.memory for buffer in op.late} | ({incoming[0].memory} if op.holds else set())
            for buffer in incoming:
                memory[buffer.memory] -= 1
            for buffer in {saved.memory for saved in op.saves}:
                users[buffer] -= 1
                if not users[buffer]:
                    memory[buffer] -= 1
            memory += Counter()  # drops what nobody holds any more
            for read, gradient in made.items():
                before = gradients.setdefault(read, gradient)
                if before is gradient:
                    continue
                if before.base is not None or memory[before.memory] > 1:  # else it is added in place
                    gradients[read] = total = Buffer(read.nbytes)
                    memory[total] += 1
                    most = max(most, _total(memory.keys() - uncounted))
                    memory[before.memory] -= 1
                memory[gradient.memory] -= 1
                memory += Counter()
        return most, vectors + _total(late)

    def _gradients_of(self, op: TapeEntry, incoming: Buffer) -> dict[Buffer, Buffer]:
        wanted = [buffer for buffer in op.reads if buffer in self.graded]
        if op.gradient == PASS:
            return dict.fromkeys(wanted, incoming)
        if op.gradient == SHARED:
            return dict.fromkeys(wanted, Buffer(max((b.nbytes for b in wanted), default=0)))
        if isinstance(op.gradient, Buffer):
            return dict.fromkeys(wanted, op.gradient)
        kinds = dict(zip(op.reads, op.gradient, strict=True)) if isinstance(op.gradient, tuple) else {}
        base = Buffer if op.gradient == VIEW else lambda nbytes: None
        return {b: incoming if kinds.get(b, NEW) == PASS else Buffer(b.nbytes, base=base(b.nbytes)) for b in wanted}


def _total(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer.base is None)
