"""Instructions, of which a step's list consists. Nothing here communicates or imports torch.

A list is what one rank does in one step, in order. Computations and messages between stages come from a schedule. The
instructions on model state (gather, release, reduce, norm, update) are placed by `program.passes`. Every instruction
runs on a lane: computations one after the other, the messages of a group one after the other beside them. It starts
once what it reads is there, and `program.effects` says what it reads and writes.

Gradients may be summed in host memory or on disks. The first reduction of a step stores its sum there, the others are
copied and added; COUNT_GRADIENT then squares the sum for the norm.

What a computation keeps for its backward may leave the device meanwhile: LEAVE copies it, FREE frees it on the device
once it is copied, RETURN copies it back. From host memory it may go on to disks: WRITE_ACTIVATIONS, FREE_HOST once it
is written, READ_ACTIVATIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.tiers import Tier

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

    __hash__ = object.__hash__  # lanes and kinds are keys: that of Enum takes three times as long


class Op(Enum):
    """The kind of an instruction."""

    RECV_FORWARD = "receive hidden states"
    FORWARD = "forward"
    SEND_FORWARD = "send hidden states"
    RECV_BACKWARD = "receive gradients"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward of the input"
    BACKWARD_WEIGHT = "backward of the weights"
    SEND_BACKWARD = "send gradients"
    GATHER = "gather parameters"
    RELEASE = "release parameters"
    READ_PARAMETERS = "read parameters"
    LOAD = "load parameters"
    REDUCE = "reduce gradients"
    REDUCE_ACROSS = "reduce gradients across"
    REDUCE_PARTIAL = "sum partial gradients over tp"
    NORM = "norm"
    UPDATE = "update"
    COPY_GRADIENT = "copy gradient to the host"
    STORE_GRADIENT = "store gradient in host memory"
    ADD_GRADIENT = "add gradient in host memory"
    COUNT_GRADIENT = "count gradient in host memory"
    READ_SUM = "read sum of gradients"
    WRITE_SUM = "write sum of gradients"
    READ_GRADIENT = "read gradient"
    FETCH_GRADIENT = "copy gradient to the device"
    READ_STATE = "read optimizer state"
    UPDATE_HOST = "update in host memory"
    COPY_PARAMETERS = "copy parameters to the device"
    STORE = "store parameters"
    WRITE_PARAMETERS = "write parameters"
    WRITE_STATE = "write optimizer state"
    LEAVE = "copy activations to host memory"
    FREE = "free activations"
    RETURN = "copy activations to the device"
    WRITE_ACTIVATIONS = "write activations"
    FREE_HOST = "free activations in host memory"
    READ_ACTIVATIONS = "read activations"

    __hash__ = object.__hash__


_BACKWARD_OPS = (Op.RECV_BACKWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD)
_COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
_TRANSFERS = (*_SENDS, Op.RECV_FORWARD, Op.RECV_BACKWARD)


class Piece(Enum):
    """What leaves a tier: parts of buckets of the model state, or what a forward has kept."""

    STATE = "master weights and moments"
    GRADIENTS = "gradients"
    SUMS = "sums of gradients"
    PARAMETERS = "parameters"
    ACTIVATIONS = "activations"

    __hash__ = object.__hash__


class TierMove(NamedTuple):
    """A copy of a piece from one tier to another. Its lane, its bytes and its colour in pictures follow from these."""

    piece: Piece
    source: Tier
    destination: Tier


MOVES: Mapping[Op, TierMove] = MappingProxyType(
    {
        Op.READ_PARAMETERS: TierMove(Piece.PARAMETERS, Tier.DISK, Tier.HOST),
        Op.LOAD: TierMove(Piece.PARAMETERS, Tier.HOST, Tier.DEVICE),
        Op.COPY_PARAMETERS: TierMove(Piece.PARAMETERS, Tier.HOST, Tier.DEVICE),
        Op.STORE: TierMove(Piece.PARAMETERS, Tier.DEVICE, Tier.HOST),
        Op.WRITE_PARAMETERS: TierMove(Piece.PARAMETERS, Tier.HOST, Tier.DISK),
        Op.READ_STATE: TierMove(Piece.STATE, Tier.DISK, Tier.HOST),
        Op.WRITE_STATE: TierMove(Piece.STATE, Tier.HOST, Tier.DISK),
        Op.COPY_GRADIENT: TierMove(Piece.GRADIENTS, Tier.DEVICE, Tier.HOST),
        Op.STORE_GRADIENT: TierMove(Piece.GRADIENTS, Tier.DEVICE, Tier.HOST),
        Op.READ_SUM: TierMove(Piece.SUMS, Tier.DISK, Tier.HOST),
        Op.WRITE_SUM: TierMove(Piece.SUMS, Tier.HOST, Tier.DISK),
        Op.READ_GRADIENT: TierMove(Piece.SUMS, Tier.DISK, Tier.HOST),
        Op.FETCH_GRADIENT: TierMove(Piece.SUMS, Tier.HOST, Tier.DEVICE),
        Op.LEAVE: TierMove(Piece.ACTIVATIONS, Tier.DEVICE, Tier.HOST),
        Op.RETURN: TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE),
        Op.WRITE_ACTIVATIONS: TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DISK),
        Op.READ_ACTIVATIONS: TierMove(Piece.ACTIVATIONS, Tier.DISK, Tier.HOST),
    }
)
"""What each copy between tiers moves. Two of the same move are told apart by when they stand: LOAD before a use and
COPY_PARAMETERS after an update, STORE_GRADIENT for the first sum, READ_SUM to add and READ_GRADIENT to update.
"""
_LANE_BETWEEN = {
    (Tier.DEVICE, Tier.HOST): Lane.TO_HOST,
    (Tier.HOST, Tier.DEVICE): Lane.TO_DEVICE,
    (Tier.DISK, Tier.HOST): Lane.FROM_DISK,
    (Tier.HOST, Tier.DISK): Lane.TO_DISK,
}
_IN_HOST_MEMORY = (Op.ADD_GRADIENT, Op.COUNT_GRADIENT, Op.UPDATE_HOST)
_LANES = {
    **dict.fromkeys(_TRANSFERS, Lane.STAGES),
    Op.GATHER: Lane.SHARDS,
    Op.REDUCE: Lane.SHARDS,
    Op.REDUCE_ACROSS: Lane.ACROSS,
    Op.REDUCE_PARTIAL: Lane.TENSOR,
    Op.NORM: Lane.WORLD,
    **dict.fromkeys(_IN_HOST_MEMORY, Lane.HOST),
    **{op: _LANE_BETWEEN[move.source, move.destination] for op, move in MOVES.items()},
}


def moves_of(*pieces: Piece) -> frozenset[Op]:
    """The copies that move one of these pieces."""
    return frozenset(op for op, move in MOVES.items() if move.piece in pieces)


READS = Op.READ_PARAMETERS, Op.LOAD
"""What brings a part of parameters from disks to the device, through a slot of a ring of its own."""
STATE_MOVES = moves_of(*(piece for piece in Piece if piece is not Piece.ACTIVATIONS)) | {
    Op.ADD_GRADIENT,
    Op.COUNT_GRADIENT,
}
"""What moves model state between tiers, or sums it there, beside the computation."""
LOCAL_LANES = frozenset({Lane.TO_HOST, Lane.TO_DEVICE, Lane.HOST, Lane.FROM_DISK, Lane.TO_DISK})
"""Lanes on which a rank meets no other: each of them works off its instructions beside the computation."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a list.

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

    op: Op
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
