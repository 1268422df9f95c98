"""Instructions, of which a step's list consists. Nothing here communicates or imports torch.

A list is what one rank does in one step, in order. Computations and messages between stages come from a schedule. The
instructions on model state (gather, release, reduce, norm, update) are placed by `program.passes`. Every instruction
runs on a lane: computations one after the other, the messages of a group one after the other beside them. An
instruction starts once what it reads is there. `program.effects` says what each instruction reads and writes, to the
checker and the simulator. In a run the lanes wait by themselves (`zero.mover`, `disk.swap`).

What moves between the device, host memory and files is data: a `TierMove` names a piece and two tiers. So optimizer
state, gradients, their sums, parameters and activations leave the device by the same kind of instruction.

Gradients may be summed in host memory or on disks. The first reduction of a step is the first sum, the others are
copied and added.

What a computation keeps for its backward may leave the device meanwhile. Once the copy is made, `Free` ends what is on
the device, and another copy brings it back. From host memory it may go on to disks in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import NamedTuple

from megazero.config.tiers import FILE_TIERS, Tier

Units = tuple[int, int]
"""The units [start, stop) of a model chunk, by their numbers within the chunk."""
ComputationKey = tuple[int, int, int]
"""(micro-batch, own number of the chunk, number of the first unit): what a forward and its backward share."""


class Lane(Enum):
    """Where an instruction runs. Instructions of one lane run in the order of the list."""

    COMPUTE = "compute"
    STAGES = "messages between stages"
    SHARDS = "messages among the ranks that share the shards of a state"
    ACROSS = "messages among the ranks that hold the same shard"
    TENSOR = "messages over tp"
    WORLD = "messages over all ranks"
    TO_HOST = "copies to host memory"
    TO_DEVICE = "copies to the device"
    HOST = "updates in host memory"
    FROM_DISK = "reads from disks"
    TO_DISK = "writes to disks"
    FROM_FILES = "reads from files"
    TO_FILES = "writes to files"

    __hash__ = object.__hash__  # lanes and kinds are keys: that of Enum takes three times as long


class Op(Enum):
    """The kinds of an instruction that need no more words: computations, messages, and arithmetic in host memory.

    ADD_GRADIENT adds a reduced gradient to a sum that is in host memory, COUNT_GRADIENT squares the sum for the norm.
    """

    RECV_FORWARD = "receive hidden states"
    FORWARD = "forward"
    SEND_FORWARD = "send hidden states"
    RECV_BACKWARD = "receive gradients"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward of the input"
    BACKWARD_WEIGHT = "backward of the weights"
    SEND_BACKWARD = "send gradients"
    GATHER = "gather parameters"
    REDUCE = "reduce gradients"
    REDUCE_ACROSS = "reduce gradients across"
    REDUCE_PARTIAL = "sum partial gradients over tp"
    NORM = "norm"
    ADD_GRADIENT = "add gradient in host memory"
    COUNT_GRADIENT = "count gradient in host memory"

    __hash__ = object.__hash__


class Piece(Enum):
    """What moves between tiers: parts of buckets of the model state, or what a forward has kept.

    REDUCED are the gradients of one reduction, on their way to be added to SUMS of a step. GRADIENTS are on their way
    to an update. Where they are summed off the device, they are the sums of the whole step. PARAMETERS are on their way
    to a use, UPDATED ones from an update to where parameters rest: both are the same column.

    What there is of a piece on a tier is a `Thing` (`program.values`), by the tables of `program.effects`.
    """

    STATE = "optimizer states"
    REDUCED = "reduced gradients"
    SUMS = "sums of gradients"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    UPDATED = "updated parameters"
    ACTIVATIONS = "activations"

    __hash__ = object.__hash__


class TierMove(NamedTuple):
    """A kind of instruction: copy a piece from one tier to the next. The lane, the bytes, the effects and the colour in
    pictures follow from these fields.
    """

    piece: Piece
    source: Tier
    destination: Tier

    @property
    def goes_out(self) -> bool:
        """Whether the destination is further from the device."""
        return self.destination.depth > self.source.depth

    @property
    def value(self) -> str:
        """The kind in words, as of an `Op`."""
        return _BETWEEN[self.source, self.destination].words.format(self.piece.value)


class Free(NamedTuple):
    """A kind of instruction: free a piece on a tier, whose copy elsewhere stays."""

    piece: Piece
    tier: Tier

    @property
    def value(self) -> str:
        """The kind in words, as of an `Op`."""
        return f"free {self.piece.value}" + " in host memory" * (self.tier is Tier.HOST)


class Update(NamedTuple):
    """A kind of instruction: an optimizer step on a tier."""

    tier: Tier

    @property
    def value(self) -> str:
        """The kind in words, as of an `Op`."""
        return "update" + " in host memory" * (self.tier is Tier.HOST)


Kind = Op | TierMove | Free | Update
"""What an instruction does. Kinds are compared by `==` where they have fields: a list that comes from another process
has others of the same fields.
"""


class _Between(NamedTuple):
    """A way between two tiers: the lane on which copies go, their name, and that of the lane in pictures."""

    lane: Lane
    words: str
    short: str


_BETWEEN = {
    (Tier.DEVICE, Tier.HOST): _Between(Lane.TO_HOST, "copy {} to host memory", "to host"),
    (Tier.HOST, Tier.DEVICE): _Between(Lane.TO_DEVICE, "copy {} to the device", "to device"),
    (Tier.DISK, Tier.HOST): _Between(Lane.FROM_DISK, "read {}", "from disk"),
    (Tier.HOST, Tier.DISK): _Between(Lane.TO_DISK, "write {}", "to disk"),
    (Tier.FILES, Tier.HOST): _Between(Lane.FROM_FILES, "read {} from a file", "from files"),
    (Tier.HOST, Tier.FILES): _Between(Lane.TO_FILES, "write {} to a file", "to files"),
}
READ_LANES = {way.lane: way.short for (source, _), way in _BETWEEN.items() if source.in_files}
WRITE_LANES = {way.lane: way.short for (_, destination), way in _BETWEEN.items() if destination.in_files}
"""The lanes of files, with their names in pictures."""


def lanes_of_files(tier: Tier) -> tuple[Lane, Lane]:
    """The lanes of a tier in files: reads and writes."""
    return _BETWEEN[tier, Tier.HOST].lane, _BETWEEN[Tier.HOST, tier].lane


def moves_of(*pieces: Piece) -> frozenset[TierMove]:
    """The copies that move one of these pieces."""
    return frozenset(TierMove(piece, *between) for piece in pieces for between in _BETWEEN)


@cache  # passes ask for the same few in long lists
def hops(piece: Piece, source: Tier, destination: Tier) -> tuple[TierMove, ...]:
    """The copies that bring a piece from one tier to another, in order: all ways lead through host memory."""
    if source is destination:
        return ()
    if (source, destination) in _BETWEEN:
        return (TierMove(piece, source, destination),)
    return TierMove(piece, source, Tier.HOST), TierMove(piece, Tier.HOST, destination)


UPDATE, UPDATE_HOST = Update(Tier.DEVICE), Update(Tier.HOST)
RELEASE = Free(Piece.PARAMETERS, Tier.DEVICE)
"""The end of gathered parameters."""
LEAVE = TierMove(Piece.ACTIVATIONS, Tier.DEVICE, Tier.HOST)
LOAD = TierMove(Piece.PARAMETERS, Tier.HOST, Tier.DEVICE)


def reads_of(piece: Piece) -> frozenset[TierMove]:
    """The copies that read a piece from files."""
    return frozenset(TierMove(piece, tier, Tier.HOST) for tier in FILE_TIERS)


def writes_of(piece: Piece) -> frozenset[TierMove]:
    """The copies that write a piece to files."""
    return frozenset(TierMove(piece, Tier.HOST, tier) for tier in FILE_TIERS)


PARAMETER_LOADS = reads_of(Piece.PARAMETERS) | {LOAD}
"""What brings a part of parameters from files to the device, through a slot of a ring of its own."""
STATE_READS = reads_of(Piece.STATE)
ACTIVATION_READS, ACTIVATION_WRITES = reads_of(Piece.ACTIVATIONS), writes_of(Piece.ACTIVATIONS)
SUMMING = moves_of(Piece.REDUCED, Piece.SUMS) | {Op.ADD_GRADIENT, Op.COUNT_GRADIENT}
"""What is done to sums of gradients that do not rest on the device."""
BESIDE_UPDATE = frozenset(
    {TierMove(Piece.GRADIENTS, Tier.DEVICE, Tier.HOST), TierMove(Piece.UPDATED, Tier.HOST, Tier.DEVICE)}
)
"""What an update in host memory exchanges with the device: no copy, where both have one memory
(`program.shape.RankShape.shares_memory`).
"""
GRADIENTS_LEAVE = frozenset(
    TierMove(piece, Tier.DEVICE, Tier.HOST) for piece in (Piece.REDUCED, Piece.SUMS, Piece.GRADIENTS)
)
"""What takes a reduced gradient from the device."""
STATE_MOVES = SUMMING | moves_of(Piece.STATE, Piece.GRADIENTS, Piece.PARAMETERS, Piece.UPDATED)
"""What moves model state between tiers, or sums it there, beside the computation."""
ACTIVATION_MOVES: frozenset[Kind] = moves_of(Piece.ACTIVATIONS) | {
    Free(Piece.ACTIVATIONS, Tier.DEVICE),
    Free(Piece.ACTIVATIONS, Tier.HOST),
}
"""What moves activations, and frees what was moved."""

_BACKWARD_OPS = (Op.RECV_BACKWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD)
_COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
_TRANSFERS = (*_SENDS, Op.RECV_FORWARD, Op.RECV_BACKWARD)
WITH_MICRO_BATCH: frozenset[Kind] = frozenset({*_COMPUTATIONS, *_TRANSFERS})
"""Computations and messages between stages."""
_LANES: Mapping[Kind, Lane] = {
    **dict.fromkeys(_TRANSFERS, Lane.STAGES),
    Op.GATHER: Lane.SHARDS,
    Op.REDUCE: Lane.SHARDS,
    Op.REDUCE_ACROSS: Lane.ACROSS,
    Op.REDUCE_PARTIAL: Lane.TENSOR,
    Op.NORM: Lane.WORLD,
    **dict.fromkeys((Op.ADD_GRADIENT, Op.COUNT_GRADIENT, UPDATE_HOST), Lane.HOST),
    **{move: _BETWEEN[move.source, move.destination].lane for move in moves_of(*Piece)},
}
DISK_LANES = frozenset({*READ_LANES, *WRITE_LANES})
"""Lanes of reads and writes."""
LOCAL_LANES = frozenset({Lane.HOST, *(way.lane for way in _BETWEEN.values())})
"""Lanes on which a rank meets no other: each of them works off its instructions beside the computation."""


class Instruction(NamedTuple):
    """One entry of a list. Lists are long, and a tuple is made in less than half the time of a frozen dataclass.

    op           the kind
    micro_batch  of a computation, transfer or copy: number of the micro-batch within the step; -1 for others
    chunk        of the same: the stage's own number of the model chunk, 0 .. V-1; -1 for others
    peer         stage at the other end of a send or receive; -1 for others
    model_chunk  the chunk's number in the model, 0 .. p*V-1; -1 in an order of computations without transfers
    units        of a computation: the units of the chunk that it computes; None: all of them, as one autograd graph.
                 Of a copy of activations: those of the computation that has kept them
    buckets      of an instruction on model state: the numbers of its buckets (`program.shape.RankShape`)
    part         of an instruction on a part of one bucket: its number (`program.shape.PartShape`); -1: on whole buckets
    slot         of host memory, through which the part passes (`passes.slots`); -1: none
    frees_slot   whether another part may take the slot behind this instruction
    """

    op: Kind
    micro_batch: int = -1
    chunk: int = -1
    peer: int = -1
    model_chunk: int = -1
    units: Units | None = None
    buckets: tuple[int, ...] = ()
    part: int = -1
    slot: int = -1
    frees_slot: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Of an instruction on a part of one bucket: the numbers of both (`program.shape.PartKey`)."""
        return self.buckets[0], self.part

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass; transfers of gradients do."""
        return self.op in _BACKWARD_OPS

    @property
    def is_compute(self) -> bool:
        return self.op in _COMPUTATIONS

    @property
    def is_send(self) -> bool:
        return self.op in _SENDS

    @property
    def is_transfer(self) -> bool:
        """Whether it is a message between stages."""
        return self.op in _TRANSFERS

    @property
    def ends_backward(self) -> bool:
        """Whether the gradients of its micro-batch and units exist after it: a whole backward, or the weights' part."""
        return self.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return _LANES.get(self.op, Lane.COMPUTE)

    @property
    def boundary(self) -> int:
        """For a send or receive: number of the boundary between model chunks that it crosses, the same at both ends."""
        return self.model_chunk if self.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else self.model_chunk - 1

    @property
    def where(self) -> str:
        """Micro-batch, chunk, units, buckets and peer, in words; empty if none applies."""
        where = [f"micro-batch {self.micro_batch}, chunk {self.chunk}"] if self.micro_batch >= 0 else []
        if self.units is not None:
            first, stop = self.units
            where.append(f"unit {first}" if stop == first + 1 else f"units {first} to {stop - 1}")
        if self.buckets:
            where.append(f"bucket{'s' * (len(self.buckets) > 1)} {', '.join(map(str, self.buckets))}")
        if self.part >= 0:
            where.append(f"part {self.part}")
        if self.peer >= 0:
            where.append(f"{'to' if self.is_send else 'from'} stage {self.peer}")
        return ", ".join(where)

    def __str__(self) -> str:
        return f"{self.op.value} ({self.where})" if self.where else self.op.value


class ProgramError(ValueError):
    """A list is incomplete, or its order is impossible, or the lists of several ranks deadlock.

    rank         whose list it is, in words; several ranks with a deadlock: None
    number       of the instruction in that list, from 0; None where the fault is no single instruction's
    instruction  itself
    """

    def __init__(
        self, what: str, rank: str | None = None, number: int | None = None, instruction: Instruction | None = None
    ) -> None:
        self.rank, self.number, self.instruction = rank, number, instruction
        at = "" if instruction is None else f" number {number} of its list, {instruction},"
        super().__init__(what if rank is None else f"{rank}:{at} {what}")
