"""Schedules: for each stage the list of its instructions in one step. Nothing here communicates or imports torch.

p stages, m micro-batches, V model chunks (virtual stages) per stage, which `mpu.chunks` assigns to the stages. Boundary
k lies between model chunks k and k + 1: hidden states cross it in forward, their gradients in backward. If both chunks
are on one stage there is no message.

There is one channel per directed pair of stages and direction (forward, backward). Both ends of a channel send and
receive its messages in the same order. A receive is posted before the computation that precedes its use, so that the
transfer overlaps that computation. A send follows the computation that made its message. `megazero.program.simulate`
checks that a schedule is complete and free of deadlocks under these rules.

1F1B: Narayanan et al. 2021 (arXiv 2104.04473), interleaved included; GPipe: Huang et al. 2019 (arXiv 1811.06965);
breadth-first order of chunks: Lamy-Poirier 2023 (arXiv 2211.05953); zero bubble: see `zero_bubble`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from megazero.mpu.chunks import ChunkMap
from megazero.pipeline.zero_bubble import zb_h1, zb_v
from megazero.program.instruction import Instruction, Op
from megazero.program.transfers import posted_ahead
from megazero.system.given import given_count

Order = Callable[[int], list[Instruction]]
"""From a stage to its computations, in order."""


def is_breadth_first(name: str, virtual_stages: int) -> bool:
    """Whether each chunk's backwards are consecutive, so that few chunks have unreduced gradients at a time."""
    return KINDS[name].breadth_first and virtual_stages > 1


def chunk_map(name: str, stages: int, virtual_stages: int) -> ChunkMap:
    """Which stage holds which model chunk under a schedule."""
    return ChunkMap(stages, virtual_stages, and_back=KINDS[name].and_back)


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Instruction, ...], ...]:
    """The list of every stage, for any number of stages, micro-batches and chunks.

    name  gpipe: all forwards, then all backwards; several chunks breadth-first, chunk by chunk
          1f1b, interleaved: forward and backward in turn; with several chunks per stage interleaved 1F1B
          zb-h1: 1f1b with split backwards, one chunk per stage
          zb-v: split backwards, two chunks per stage, there and back

    Raises ValueError for an unknown name, a count below 1, or a number of chunks that the schedule does not have, and
    TypeError for a count that is no whole number.
    """
    order_of, chunks = _orders(name, stages, micro_batches, virtual_stages)
    return tuple(_with_transfers(order_of(stage), stage, chunks) for stage in range(stages))


def make_orders(
    name: str, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[list[list[Instruction]], ChunkMap]:
    """The computations of every stage in order, with the stage's own numbers of its chunks, and the map of these.
    Arguments and errors as in `make_schedule`.
    """
    order_of, chunks = _orders(name, stages, micro_batches, virtual_stages)
    return [order_of(stage) for stage in range(stages)], chunks


# Layouts of a search that differ in ZeRO stage or recompute ask for the same list. Counts that are no ints stay errors.
@lru_cache(maxsize=512, typed=True)
def stage_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int, stage: int
) -> tuple[Instruction, ...]:
    """The list of one stage. Arguments and errors as in `make_schedule`."""
    order_of, chunks = _orders(name, stages, micro_batches, virtual_stages)
    return _with_transfers(order_of(stage), stage, chunks)


def forward_only(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The list for evaluation: the same forwards in the same order, with receives posted one computation ahead."""
    forwards = [i for i in instructions if i.op is Op.FORWARD]
    receives = {(i.micro_batch, i.chunk): i for i in instructions if i.op is Op.RECV_FORWARD}
    sends = {(i.micro_batch, i.chunk): i for i in instructions if i.op is Op.SEND_FORWARD}
    return posted_ahead(
        (receives.get((i.micro_batch, i.chunk)), i, sends.get((i.micro_batch, i.chunk))) for i in forwards
    )


def _check_counts(name: str, stages: int, micro_batches: int, virtual_stages: int) -> None:
    if name not in KINDS:
        raise ValueError(f"pipeline schedule {name!r} is none of {', '.join(SCHEDULES)}")
    counts = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    for what, count in counts.items():
        given_count(what, count, f"there is no pipeline schedule with {count}")
    if CHUNKS[name] not in (None, virtual_stages):
        raise ValueError(f"pipeline schedule {name} has {CHUNKS[name]} chunks per stage, not {virtual_stages}")


def _orders(name: str, stages: int, m: int, virtual_stages: int) -> tuple[Order, ChunkMap]:
    """The order of computations as a function of the stage, and the map of chunks."""
    _check_counts(name, stages, m, virtual_stages)
    return KINDS[name].orders(stages, m, virtual_stages), chunk_map(name, stages, virtual_stages)


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
    """The groups of micro-batches that pass the chunks together in the interleaved schedule.

    Each has at least `stages` micro-batches, if there are so many. A shorter group would wait for its own round trip at
    every chunk, and with some counts the order would deadlock (8 stages, 2 chunks, 10 micro-batches as 8 + 2). A
    remainder is therefore spread over the groups. The bubble stays (p - 1) / (m V + p - 1) for every m >= p; a few more
    activations are alive.
    """
    count = max(1, micro_batches // stages)
    bounds = [-(-i * micro_batches // count) for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _interleaved(stages: int, m: int, chunks: int, stage: int) -> list[Instruction]:
    groups = micro_batch_groups(stages, m)
    forwards = [Instruction(Op.FORWARD, i, c) for group in groups for c in range(chunks) for i in group]
    backwards = [Instruction(Op.BACKWARD, i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    # The last stage starts its first backward once the first micro-batch has passed its last chunk. An earlier stage
    # fills the time of the messages to the last stage and back with further forwards.
    warm_up = (chunks - 1) * max(map(len, groups)) + 2 * (stages - 1 - stage)
    return _alternate(forwards, backwards, warm_up)


def _in_turn(stages: int, m: int, chunks: int) -> Order:
    if chunks == 1:
        return lambda stage: _one_forward_one_backward(m, warm_up=stages - 1 - stage)
    return lambda stage: _interleaved(stages, m, chunks, stage)


# Each stage asks for its own order, and all are made together.
@lru_cache(maxsize=16)
def _zb_v(m: int, stages: int) -> list[list[Instruction]]:
    return zb_v(m, stages)


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule.

    orders         (stages, micro-batches, chunks per stage) -> the order of each stage's computations
    chunks         number of chunks per stage; None: any
    and_back       assign chunks there and back instead of in turns (`mpu.chunks`)
    breadth_first  with several chunks per stage, the backwards of one chunk are consecutive
    """

    orders: Callable[[int, int, int], Order]
    chunks: int | None = None
    and_back: bool = False
    breadth_first: bool = False


KINDS: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "gpipe": ScheduleKind(lambda stages, m, chunks: lambda stage: _gpipe(m, chunks), breadth_first=True),
        "1f1b": ScheduleKind(_in_turn),
        "interleaved": ScheduleKind(_in_turn),
        "zb-h1": ScheduleKind(lambda stages, m, chunks: lambda stage: zb_h1(m, stages, stage), chunks=1),
        "zb-v": ScheduleKind(lambda stages, m, chunks: _zb_v(m, stages).__getitem__, chunks=2, and_back=True),
    }
)
"""Choices of --pipeline-schedule."""
CHUNKS: Mapping[str, int | None] = MappingProxyType({name: kind.chunks for name, kind in KINDS.items()})
"""Schedule -> number of chunks per stage; None: any."""
SCHEDULES = tuple(KINDS)


def _with_transfers(order: list[Instruction], stage: int, chunks: ChunkMap) -> tuple[Instruction, ...]:
    """Number the chunks as the model does, and add what a stage sends and receives."""
    numbers = chunks.of(stage)
    in_front = [_peer(stage, number - 1, chunks) for number in numbers]
    behind = [_peer(stage, number + 1, chunks) for number in numbers]

    def transfers(i: Instruction) -> tuple[Instruction | None, Instruction, Instruction | None]:
        front, back, number = in_front[i.chunk], behind[i.chunk], numbers[i.chunk]
        numbered = Instruction(i.op, i.micro_batch, i.chunk, model_chunk=number)
        if i.op is Op.FORWARD:
            return _transfer(Op.RECV_FORWARD, numbered, front), numbered, _transfer(Op.SEND_FORWARD, numbered, back)
        if i.op is Op.BACKWARD_WEIGHT:
            return None, numbered, None
        return _transfer(Op.RECV_BACKWARD, numbered, back), numbered, _transfer(Op.SEND_BACKWARD, numbered, front)

    return posted_ahead(map(transfers, order))


def _peer(stage: int, model_chunk: int, chunks: ChunkMap) -> int | None:
    """The other stage that holds a model chunk; None if there is no such chunk, or it is on this stage."""
    holder = chunks.holder(model_chunk)[0] if 0 <= model_chunk < chunks.count else stage
    return None if holder == stage else holder


def _transfer(op: Op, of: Instruction, peer: int | None) -> Instruction | None:
    return None if peer is None else Instruction(op, of.micro_batch, of.chunk, peer, model_chunk=of.model_chunk)
