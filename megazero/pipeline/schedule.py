"""A schedule is data: for each stage, the list of what it does in one step. Nothing here communicates or imports torch.

Words: p stages, m micro-batches, V model chunks (virtual stages) per stage. Chunk c of stage i is model chunk c*p + i,
so a micro-batch passes all stages once per chunk and wraps from the last stage to the first between chunks. Boundary k
is what model chunk k hands to chunk k + 1 (hidden states, forward) and gets back (their gradient, backward).

Stages talk over channels: one per directed pair of stages and direction (forward, backward). A channel's messages are
sent and received in the same order. A receive is posted ahead of its use, before the computation that precedes it, so
that the transfer overlaps that computation; a send is issued right after the computation that made its message.
`megazero.pipeline.simulate` proves a schedule complete and free of deadlocks under these rules.

1F1B: Narayanan et al. 2021 (arXiv 2104.04473), interleaved included; GPipe: Huang et al. 2019 (arXiv 1811.06965);
breadth-first order of chunks: Lamy-Poirier 2023 (arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Op(Enum):
    """What an instruction does."""

    RECV_FORWARD = "receive hidden states"
    FORWARD = "forward"
    SEND_FORWARD = "send hidden states"
    RECV_BACKWARD = "receive gradients"
    BACKWARD = "backward"
    SEND_BACKWARD = "send gradients"


_BACKWARD_OPS = (Op.RECV_BACKWARD, Op.BACKWARD, Op.SEND_BACKWARD)
_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
_RECEIVES = (Op.RECV_FORWARD, Op.RECV_BACKWARD)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a stage's list.

    micro_batch  number of the micro-batch within the step
    chunk        the stage's own number of the model chunk, 0 .. V-1
    peer         stage at the other end of a send or receive; -1 for computation
    reduce       of a backward: gradients of this chunk are reduced as they complete
    """

    op: Op
    micro_batch: int
    chunk: int
    peer: int = -1
    reduce: bool = False

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass, transfers of gradients included."""
        return self.op in _BACKWARD_OPS

    @property
    def is_compute(self) -> bool:
        return self.op in (Op.FORWARD, Op.BACKWARD)

    @property
    def is_send(self) -> bool:
        return self.op in _SENDS

    @property
    def is_receive(self) -> bool:
        return self.op in _RECEIVES

    def __str__(self) -> str:
        where = f"micro-batch {self.micro_batch}, chunk {self.chunk}"
        towards = "" if self.peer < 0 else f", {'to' if self.is_send else 'from'} stage {self.peer}"
        return f"{self.op.value} ({where}{towards})"


def boundary(instruction: Instruction, stage: int, stages: int) -> int:
    """Number of the boundary between model chunks that a send or receive crosses; the same seen from both ends."""
    own = instruction.chunk * stages + stage
    return own if instruction.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else own - 1


def is_breadth_first(name: str, virtual_stages: int) -> bool:
    """Whether each chunk's backwards are consecutive, so that one reduction per chunk needs few full gradients at a time."""
    return name == "gpipe" and virtual_stages > 1


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1, *, reduce_every: bool = False
) -> tuple[tuple[Instruction, ...], ...]:
    """The list of every stage. Any number of micro-batches goes with any number of stages and chunks.

    name          gpipe: all forwards, then all backwards; with several chunks breadth-first, chunk by chunk.
                  1f1b: forward and backward in turn; with several chunks it is the interleaved schedule.
                  interleaved: the same, which with one chunk per stage is 1f1b.
    reduce_every  gradients are reduced in every backward, instead of in the last one of each chunk.

    Raises ValueError for an unknown name or a count below 1.
    """
    _check_counts(name, stages, micro_batches, virtual_stages)
    return tuple(stage_schedule(name, stages, micro_batches, virtual_stages, stage, reduce_every=reduce_every) for stage in range(stages))


def stage_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int, stage: int, *, reduce_every: bool = False
) -> tuple[Instruction, ...]:
    """The list of one stage alone: what a rank needs. Arguments and errors as in `make_schedule`."""
    _check_counts(name, stages, micro_batches, virtual_stages)
    if name == "gpipe":
        order = _gpipe(micro_batches, virtual_stages)
    elif virtual_stages == 1:
        order = _one_forward_one_backward(micro_batches, warm_up=stages - 1 - stage)
    else:
        order = _interleaved(stages, micro_batches, virtual_stages, stage)
    return _with_transfers(_with_reduction(order, reduce_every), stage, stages, virtual_stages)


def forward_only(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list for evaluation: the same forwards in the same order, receives again posted one computation ahead."""
    forwards = [i for i in instructions if i.op is Op.FORWARD]
    receives = {(i.micro_batch, i.chunk): i for i in instructions if i.op is Op.RECV_FORWARD}
    sends = {(i.micro_batch, i.chunk): i for i in instructions if i.op is Op.SEND_FORWARD}
    return _posted_ahead((receives.get((i.micro_batch, i.chunk)), i, sends.get((i.micro_batch, i.chunk))) for i in forwards)


def _check_counts(name: str, stages: int, micro_batches: int, virtual_stages: int) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"pipeline schedule {name!r} is none of {', '.join(SCHEDULES)}")
    for count, what in ((stages, "stages"), (micro_batches, "micro-batches"), (virtual_stages, "virtual stages")):
        if count < 1:
            raise ValueError(f"a pipeline schedule with {count} {what}")


def _gpipe(m: int, chunks: int) -> list[Instruction]:
    forwards = [Instruction(Op.FORWARD, i, c) for c in range(chunks) for i in range(m)]
    backwards = [Instruction(Op.BACKWARD, i, c) for c in reversed(range(chunks)) for i in range(m)]
    return forwards + backwards


def _alternate(forwards: list[Instruction], backwards: list[Instruction], warm_up: int) -> list[Instruction]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards[warm_up:]) :]


def _one_forward_one_backward(m: int, warm_up: int) -> list[Instruction]:
    forwards = [Instruction(Op.FORWARD, i, 0) for i in range(m)]
    backwards = [Instruction(Op.BACKWARD, i, 0) for i in range(m)]
    return _alternate(forwards, backwards, warm_up)


def micro_batch_groups(stages: int, micro_batches: int) -> list[range]:
    """The groups that pass the chunks together in the interleaved schedule: each at least `stages` long, if there are so many.

    A group shorter than the pipeline would wait for its own round trip at every chunk, and with some counts the order
    has no execution at all (8 stages, 2 chunks, 10 micro-batches as 8 + 2). So what does not divide is spread over the
    groups: the bubble stays (p - 1) / (m V + p - 1) for every m >= p, for a few more live activations.
    """
    count = max(1, micro_batches // stages)
    bounds = [-(-i * micro_batches // count) for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _interleaved(stages: int, m: int, chunks: int, stage: int) -> list[Instruction]:
    groups = micro_batch_groups(stages, m)
    forwards = [Instruction(Op.FORWARD, i, c) for group in groups for c in range(chunks) for i in group]
    backwards = [Instruction(Op.BACKWARD, i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    # The last stage starts its first backward once the first micro-batch has passed its last chunk; a stage before it
    # fills the time of the way there and back.
    warm_up = (chunks - 1) * max(map(len, groups)) + 2 * (stages - 1 - stage)
    return _alternate(forwards, backwards, warm_up)


def _with_reduction(order: list[Instruction], reduce_every: bool) -> list[Instruction]:
    last = {instruction.chunk: at for at, instruction in enumerate(order) if instruction.op is Op.BACKWARD}
    return [
        Instruction(i.op, i.micro_batch, i.chunk, reduce=True) if i.op is Op.BACKWARD and (reduce_every or last[i.chunk] == at) else i
        for at, i in enumerate(order)
    ]


def _with_transfers(order: list[Instruction], stage: int, stages: int, chunks: int) -> tuple[Instruction, ...]:
    """Add what a stage sends and receives. On a single stage chunks hand over locally, without instructions."""
    before, behind = (stage - 1) % stages, (stage + 1) % stages

    def transfers(i: Instruction) -> tuple[Instruction | None, Instruction, Instruction | None]:
        own = i.chunk * stages + stage
        to_front = before if own > 0 and stages > 1 else None
        to_back = behind if own < stages * chunks - 1 and stages > 1 else None
        if i.op is Op.FORWARD:
            return _transfer(Op.RECV_FORWARD, i, to_front), i, _transfer(Op.SEND_FORWARD, i, to_back)
        return _transfer(Op.RECV_BACKWARD, i, to_back), i, _transfer(Op.SEND_BACKWARD, i, to_front)

    return _posted_ahead(map(transfers, order))


def _transfer(op: Op, of: Instruction, peer: int | None) -> Instruction | None:
    return None if peer is None else Instruction(op, of.micro_batch, of.chunk, peer)


def _posted_ahead(steps: Iterable[tuple[Instruction | None, Instruction, Instruction | None]]) -> tuple[Instruction, ...]:
    """Lay out (receive, computation, send) steps with every receive before the computation of the step in front of it."""
    laid: list[Instruction] = []
    held: list[Instruction] = []
    for receive, compute, send in steps:
        laid += [receive] if receive else []
        laid += held
        held = [compute, send] if send else [compute]
    return tuple(laid + held)
