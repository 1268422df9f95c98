"""Instructions, of which schedules consist. Nothing here communicates or imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


_BACKWARD_OPS = (Op.RECV_BACKWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD)
_COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One entry of a stage's list.

    op           the kind
    micro_batch  number of the micro-batch within the step
    chunk        the stage's own number of the model chunk, 0 .. V-1
    peer         stage at the other end of a send or receive; -1 for a computation
    reduce       for a backward, or the weights' part of one: reduce the gradients of this chunk as they complete
    model_chunk  the chunk's number in the model, 0 .. p*V-1; -1 in an order of computations without transfers
    """

    op: Op
    micro_batch: int
    chunk: int
    peer: int = -1
    reduce: bool = False
    model_chunk: int = -1

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
    def ends_backward(self) -> bool:
        """Whether all gradients of its micro-batch and chunk exist after it: a whole backward, or the weights' part."""
        return self.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)

    @property
    def boundary(self) -> int:
        """For a send or receive: number of the boundary between model chunks that it crosses, the same at both ends."""
        return self.model_chunk if self.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else self.model_chunk - 1

    def __str__(self) -> str:
        where = f"micro-batch {self.micro_batch}, chunk {self.chunk}"
        towards = "" if self.peer < 0 else f", {'to' if self.is_send else 'from'} stage {self.peer}"
        return f"{self.op.value} ({where}{towards})"
