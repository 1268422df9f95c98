"""Messages between pipeline stages: asynchronous sends and receives of tensors whose shape both ends know.

Every directed pair of neighbouring stages has a channel for hidden states (forward) and one for their gradients
(backward), as far as the layout of the chunks needs them. So no message waits behind one in the other direction.

NCCL runs the operations of a communicator in order of issue. With NCCL each channel therefore is a two-rank group, and
messages are matched by order; `megazero.program.simulate` checks that the order is the same at both ends. Other
backends match messages by tag, on the pipeline's group. gloo cannot read CUDA tensors; they go through pinned host
memory.

A sent tensor is kept until its send is complete. NCCL and MPI can be polled for that; with gloo one can only wait. A
thread per channel does this wait, because a stage that waited itself could deadlock: its peer may be waiting for the
stage's next message and not for this one.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import ProcessGrid, join_group
from megazero.mpu.parameter import StateGroup
from megazero.mpu.shared_memory import PeerError

Channel = tuple[int, int, bool]
"""(sending stage, receiving stage, whether it carries gradients)."""


class Tag(NamedTuple):
    """The identity of a message, the same at both ends. `boundary` k lies between model chunks k and k + 1."""

    backward: bool
    boundary: int
    micro_batch: int

    @property
    def number(self) -> int:
        """An integer below 2^31 for backends that match by tag."""
        assert self.boundary < 1 << 14 and self.micro_batch < 1 << 16
        return self.micro_batch << 15 | self.boundary << 1 | self.backward

    def __str__(self) -> str:
        kind = "the gradient" if self.backward else "the hidden states"
        return f"{kind} of micro-batch {self.micro_batch} at boundary {self.boundary}"


class Channels:
    """Sends and receives between this rank's stage and its neighbours.

    and_back  hidden states go there and back between neighbours (`mpu.chunks`) instead of around a ring of stages

    All ranks of the pipeline group create it together. With NCCL that connects each channel by a message of one
    element. A message may take as long as the grid's timeout. Any method may raise PeerError after a message has
    failed.
    """

    def __init__(self, grid: ProcessGrid, and_back: bool = False) -> None:
        self.grid, self.timeout = grid, grid.timeout
        self._stage, stages = grid.pp.index, grid.pp.size
        self._by_tag = grid.pp.is_on_host
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sent: dict[Channel, _PendingSends] = {}
        if stages > 1 and not self._by_tag and grid.pp.mail is None:
            self._create_groups(stages, and_back)

    def send(self, tensor: Tensor, stage: int, tag: Tag) -> None:
        """Start to send a contiguous tensor of any shape to a stage. The tensor must not be written to afterwards."""
        assert tensor.is_contiguous() and stage != self._stage
        channel = (self._stage, stage, tag.backward)
        if self.grid.pp.mail is not None:
            self.grid.pp.traffic["send", tensor.dtype] += tensor.nbytes
            self.grid.pp.mail.send(tensor, self.grid.pp.ranks[stage], tag)
            return
        if channel not in self._sent:
            on_host = dist.get_backend(self._group(channel)) == "gloo"
            self._sent[channel] = _ThreadedSends() if on_host else _PolledSends()
        sent = self._sent[channel]
        what = f"sending {tag} from stage {self._stage} to stage {stage} (rank {self.grid.pp.ranks[stage]})"
        self.grid.pp.traffic["send", tensor.dtype] += tensor.nbytes
        # On CUDA with gloo this copy blocks the host until the tensor is computed.
        buffer = _pinned_like(tensor).copy_(tensor) if self._is_staged(tensor) else tensor
        with _blaming(what):
            work = dist.isend(
                buffer, self.grid.pp.ranks[stage], group=self._group(channel), tag=tag.number if self._by_tag else 0
            )
        assert work is not None
        sent.keep(buffer, _Message(work, what, self.timeout if self._by_tag else None))

    def receive(self, buffer: Tensor, stage: int, tag: Tag) -> CommunicationHandle:
        """Start to receive into a contiguous tensor, valid after `wait()` (on CUDA: for the current stream)."""
        assert buffer.is_contiguous() and stage != self._stage
        channel = (stage, self._stage, tag.backward)
        what = f"receiving {tag} at stage {self._stage} from stage {stage} (rank {self.grid.pp.ranks[stage]})"
        self.grid.pp.traffic["receive", buffer.dtype] += buffer.nbytes
        if self.grid.pp.mail is not None:
            return CommunicationHandle(None, self.grid.pp.mail.receive(buffer, self.grid.pp.ranks[stage], tag))
        staged = self._is_staged(buffer)
        target = _pinned_like(buffer) if staged else buffer
        with _blaming(what):
            work = dist.irecv(
                target, self.grid.pp.ranks[stage], group=self._group(channel), tag=tag.number if self._by_tag else 0
            )
        assert work is not None
        message = _Message(work, what, self.timeout if self._by_tag else None)
        return _ReceiveHandle(message, (lambda: buffer.copy_(target, non_blocking=True)) if staged else None)

    def flush(self) -> None:
        """Return once every send is complete (with NCCL: the current stream waits instead of the host)."""
        for sent in self._sent.values():
            sent.flush()

    def _group(self, channel: Channel) -> dist.ProcessGroup:
        handle = self.grid.pp.handle if self._by_tag else self._groups[channel]
        assert handle is not None
        return handle

    def _is_staged(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and self._by_tag

    def _create_groups(self, stages: int, and_back: bool) -> None:
        """Create a two-rank group for each channel of this rank and send a first message, upon which NCCL connects.

        This is done in rounds: edges from even stages, edges from odd stages, and the wrap of an odd ring. In a round
        each stage meets one neighbour only, so that stages do not wait for each other in a circle or one after another.
        """
        if StateGroup.TIED not in self.grid.shared:
            self._placeholder()  # stages that share parameters have created one more group
        for turn in range(2 + stages % 2):
            edges = [
                (i, (i + 1) % stages) for i in range(stages) if (2 if stages % 2 and i == stages - 1 else i % 2) == turn
            ]
            mine = [edge for edge in edges if self._stage in edge and not (and_back and edge[1] == 0)]
            for against, backward in [(False, False), (True, True), *[(True, False), (False, True)] * and_back]:
                if mine:
                    front, back = mine[0]
                    self._connect((back, front, backward) if against else (front, back, backward))
                else:
                    self._placeholder()

    def _connect(self, channel: Channel) -> None:
        source, target = (self.grid.pp.ranks[stage] for stage in channel[:2])
        pair = sorted((source, target))
        self._groups[channel] = group = join_group(pair, self.timeout, self.grid.pp, message_ctas())
        greeting = torch.zeros(1, device=self.grid.device)
        if self._stage == channel[0]:
            dist.send(greeting, target, group=group)
        else:
            dist.recv(greeting, source, group=group)

    def _placeholder(self) -> None:
        """Create a group of one, so that all ranks have created the same number of groups.

        torch names a group after its ranks and the number of groups that the rank has created. Two ranks with different
        numbers would wait for each other under different names until the timeout.
        """
        dist.new_group([self.grid.rank], backend="gloo", use_local_synchronization=True)


MESSAGE_CTAS = "MEGAZERO_MESSAGE_CTAS"


def message_ctas() -> int | None:
    """The most thread blocks of a message with NCCL: MEGAZERO_MESSAGE_CTAS, 4 by default; None for 0: NCCL decides.

    A posted receive stays on the device until its message comes. Each of its thread blocks keeps a multiprocessor from
    computing for so long, and NCCL takes up to 32. Four carry several times the bytes of a message in the time of a
    computation. Raises ValueError for anything but a count.
    """
    given = os.environ.get(MESSAGE_CTAS, "4")
    if not given.isdecimal() or int(given) > 32:
        raise ValueError(f"{MESSAGE_CTAS}={given}: a number of thread blocks from 1 to 32, or 0 for NCCL's own choice")
    return int(given) or None


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn a backend's error into a PeerError that says which message failed."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{what} failed: {error}") from error


class _Message:
    """A send or receive that has been started."""

    def __init__(self, work: dist.Work, what: str, timeout: timedelta | None) -> None:
        self.work, self.what, self.timeout = work, what, timeout

    def wait(self) -> None:
        with _blaming(self.what):
            if self.timeout is None:
                self.work.wait()
            else:
                self.work.wait(self.timeout)


class _ReceiveHandle(CommunicationHandle):
    def __init__(self, message: _Message, after: Callable[[], object] | None) -> None:
        super().__init__()
        self._message: _Message | None = message
        self._copy = after

    def wait(self) -> None:
        if self._message is not None:
            self._message.wait()
        if self._copy is not None:
            self._copy()
        self._message = self._copy = None


class _PendingSends:
    """The sends of one channel whose tensors are still needed."""

    def keep(self, tensor: Tensor, message: _Message) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        raise NotImplementedError


class _PolledSends(_PendingSends):
    """For a backend that can be polled for the end of a send."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Tensor, _Message]] = deque()

    def keep(self, tensor: Tensor, message: _Message) -> None:
        while self._kept and self._kept[0][1].work.is_completed():
            self._kept.popleft()[1].wait()
        self._kept.append((tensor, message))

    def flush(self) -> None:
        while self._kept:
            self._kept.popleft()[1].wait()


class _ThreadedSends(_PendingSends):
    """For a backend that can only be waited for: a daemon thread waits for sends in order and frees their tensors."""

    def __init__(self) -> None:
        self._queue: _Queue = queue.SimpleQueue()
        self._errors: list[PeerError] = []
        threading.Thread(
            target=_wait_for_each, args=(self._queue, self._errors), name="megazero sends", daemon=True
        ).start()
        weakref.finalize(self, self._queue.put, None)

    def keep(self, tensor: Tensor, message: _Message) -> None:
        self._raise()
        self._queue.put((tensor, message))

    def flush(self) -> None:
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]


_Queue = queue.SimpleQueue[tuple[Tensor, _Message] | threading.Event | None]


def _wait_for_each(items: _Queue, errors: list[PeerError]) -> None:
    """Wait for the queue's sends and set its events until None comes. After an error the rest is dropped unwaited."""
    while (item := items.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
        elif not errors:
            try:
                item[1].wait()
            except PeerError as error:
                errors.append(error)
        del item
