"""What the passes, the checker and the simulator know of a rank: its units and buckets, without tensors.

All ranks of a role, that is of one stage and one tp index, have the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from megazero.config.tiers import SLOTS, Tier
from megazero.program.instruction import Piece

IN_FLIGHT = 2
"""Most reductions at a time where each needs a buffer of its own (sharded gradients, or a cast copy)."""
PartKey = tuple[int, int]
"""The number of a bucket and of its part."""


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of a bucket's messages on its way between ranks, by the convention of the ZeRO papers: what an all-gather
    delivers, and what a reduce-scatter is given. An all-reduce counts as both.

    parameters      a gather of its whole parameters
    scatter         a reduce-scatter of its gradient over the ranks that share the shards
    gather          a gather of its summed gradient over them
    across_scatter  a reduce-scatter of one shard over the ranks that hold the same one
    across_gather   a gather of its sum over them
    parameters_in_blocks, gradients_in_blocks
                    whether they travel in blocks of small integers, for which both ends need memory of their own
    """

    parameters: int
    scatter: int
    gather: int
    across_scatter: int
    across_gather: int
    parameters_in_blocks: bool = False
    gradients_in_blocks: bool = False


@dataclass(frozen=True)
class PartShape:
    """A range of what a rank updates of a bucket, or reads of it from disks.

    tier             where its optimizer state rests. On the device it is updated there, else in host memory
    gradient_bytes   of its gradient
    state_bytes      of its optimizer state
    parameter_bytes  of its parameters, as they are stored
    """

    tier: Tier
    gradient_bytes: int
    state_bytes: int
    parameter_bytes: int

    def bytes_of(self, piece: Piece) -> int:
        """Bytes of a piece of the model state, wherever the piece is on its way."""
        if piece is Piece.STATE:
            return self.state_bytes
        return self.parameter_bytes if piece in (Piece.PARAMETERS, Piece.UPDATED) else self.gradient_bytes


@dataclass(frozen=True)
class BucketShape:
    """A bucket of a rank (`zero.layout.BucketLayout`).

    chunk             the stage's own number of the model chunk that it belongs to
    parameter_bytes   bytes of its whole parameter column
    gradient_bytes    bytes of its whole gradient column; 0 for frozen parameters
    trained           whether its parameters have gradients and are updated
    gathered          whether its parameters are there for each use only: they are sharded (ZeRO-3), stored as codes, or
                      do not rest on the device
    sharded_gradient  whether a rank keeps only its shard of a reduced gradient (ZeRO-2, 3)
    sharded_state     whether a rank updates only its shard. Unless `gathered`, the parameters are gathered afterwards
    shards            number of ranks that share the shards of its state
    across            number of ranks that hold the same shard
    spans_stages      whether ranks of several stages hold it: a tied embedding
    shards_span       whether these also share out its shards; else each stage has all shards, and sums them across
    sent              the bytes of its messages; None: everything travels as it is (`messages`)
    code_bytes        bytes of the codes that the rank stores instead of its parameters; None: it stores no codes
    parts             the ranges in which it is updated, where some of its optimizer state is not on the device or its
                      parameters rest on disks; none: it is updated as a whole, on the device
    rests             where the parameters rest that the rank stores
    rests_whole       of a gathered bucket: whether the rank stores all of its parameters, and not a shard
    sums              where its gradients are summed and wait for their update
    partial           whether some of its gradients are partial sums that have to be added over tp
    """

    chunk: int
    parameter_bytes: int
    gradient_bytes: int
    trained: bool = True
    gathered: bool = False
    sharded_gradient: bool = False
    sharded_state: bool = False
    shards: int = 1
    across: int = 1
    spans_stages: bool = False
    shards_span: bool = False
    sent: MessageBytes | None = None
    code_bytes: int | None = None
    parts: tuple[PartShape, ...] = ()
    rests: Tier = Tier.DEVICE
    rests_whole: bool = False
    sums: Tier = Tier.DEVICE
    partial: bool = False

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of what the rank stores of its parameter column, wherever it rests."""
        if self.code_bytes is not None:
            return self.code_bytes
        return self.parameter_bytes // (self.shards if self.is_sharded else 1)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share out its parameters, so that a gather communicates."""
        return self.gathered and not self.rests_whole and self.shards > 1

    @cached_property
    def is_loaded(self) -> bool:
        """Whether its parameters are brought to the device for each use."""
        return self.rests is not Tier.DEVICE

    @property
    def is_loaded_in_place(self) -> bool:
        """Whether they are then whole: no other rank has a part of them, and they are no codes."""
        return self.is_loaded and not self.is_sharded and self.code_bytes is None

    @property
    def loads(self) -> tuple[int, ...]:
        """The parts in which its parameters are loaded, by number; -1 stands for all of them."""
        return tuple(range(len(self.parts))) if self.rests.in_files else (-1,)

    @cached_property
    def messages(self) -> MessageBytes:
        """The bytes of its messages."""
        if self.sent is not None:
            return self.sent
        whole, shard = self.gradient_bytes, self.gradient_bytes // self.shards
        return MessageBytes(self.parameter_bytes, whole, whole, shard, shard)

    @property
    def sums_leave(self) -> bool:
        """Whether its gradients are summed off the device: each is there until it is reduced and has been copied."""
        return self.sums is not Tier.DEVICE

    @cached_property
    def lends_gradient(self) -> bool:
        """Whether its whole gradient is in a borrowed buffer, from a backward to its reduction."""
        return self.sharded_gradient or self.sums_leave

    @property
    def reduced_at_end(self) -> bool:
        """Whether it is reduced once, behind all backwards of a step: stages that share it end theirs at different
        times, and have to meet for its shards, or for a sum that leaves the device.
        """
        return self.shards_span or (self.spans_stages and self.sums_leave)

    @property
    def travels(self) -> bool:
        """Whether its gradients are communicated at all: whether several ranks hold it."""
        return self.shards * self.across > 1

    @property
    def numbers_of_parts(self) -> tuple[int, ...]:
        """The parts in which it is updated, by number; -1 stands for the whole bucket."""
        return tuple(range(len(self.parts))) or (-1,)

    @property
    def updated_off_device(self) -> bool:
        """Whether some of it is updated in host memory, beside the computations of the next step."""
        return any(part.tier is not Tier.DEVICE for part in self.parts)

    @property
    def gathered_after_update(self) -> bool:
        """Whether the ranks update different shards of parameters that each of them keeps whole (ZeRO-1, 2)."""
        return self.trained and self.sharded_state and not self.gathered and self.shards > 1


@dataclass(frozen=True)
class UnitShape:
    """A unit of a model chunk: embedding, block or head. All fields but `kept` are tuples of numbers of buckets.

    forward    those whose parameters its forward reads
    backward   those whose parameters its backward reads
    gradients  those to whose gradients its backward adds
    at_once    of these, those to which the input's half of a split backward adds already: an embedding's table
    in_forward of these, those to which its forward adds already: a head's table
    kept       bytes that it keeps of a micro-batch from its forward to its backward; 0 where nobody has counted them
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gradients: tuple[int, ...]
    at_once: tuple[int, ...] = ()
    in_forward: tuple[int, ...] = ()
    kept: int = 0


@dataclass(frozen=True)
class RankShape:
    """The model state of a rank.

    units          by the rank's own number of a chunk, then in forward order
    buckets        all buckets; the trained ones come first, in forward order
    sums_partials  whether gradients of replicas over tp are partial sums that are added once a step; those of buckets
                   whose sums leave the device are added in each reduction (`BucketShape.partial`)
    resident_bytes of the largest piece of optimizer state that rests on the device and passes through a slot to disks
    slots          of each ring, through which parts pass (`program.passes.slots`)
    shares_memory  whether the memory of the device is that of the host, so that an update in host memory reads and
                   writes what rests on the device where that is
    """

    units: tuple[tuple[UnitShape, ...], ...]
    buckets: tuple[BucketShape, ...]
    sums_partials: bool = False
    resident_bytes: int = 0
    slots: int = SLOTS
    shares_memory: bool = False

    @property
    def read_ahead(self) -> tuple[PartKey, ...]:
        """The parts whose optimizer state may be read before the norm is known: the first ones that rest in files, one
        for each slot (`program.passes.before_norm`).
        """
        in_files = (
            (number, at)
            for number in self.trained
            for at, part in enumerate(self.buckets[number].parts)
            if part.tier.in_files
        )
        return tuple(islice(in_files, self.slots))

    @property
    def early(self) -> tuple[PartKey, ...]:
        """The parts that may be updated before the norm is known (`program.passes.before_norm`): the tier of their
        optimizer state goes back, should the norm forbid the update, and their gradients are complete before the end of
        the step.
        """
        return tuple(
            (number, at)
            for number in self.trained
            for at, part in enumerate(self.buckets[number].parts)
            if part.tier.goes_back and self._is_complete_early(self.buckets[number])
        )

    def _is_complete_early(self, bucket: BucketShape) -> bool:
        """Whether a bucket's gradient is reduced beside the backward, and not once at the end of a step."""
        return not bucket.spans_stages and (bucket.sums_leave or not self.sums_partials)

    @property
    def trained(self) -> tuple[int, ...]:
        """The numbers of the trained buckets."""
        return tuple(number for number, bucket in enumerate(self.buckets) if bucket.trained)

    def bytes_of(self, buckets: Iterable[int]) -> int:
        """Bytes of the whole parameters of these buckets."""
        return sum(self.buckets[number].parameter_bytes for number in buckets)

    def kept_by(self, chunk: int, units: tuple[int, int] | None) -> int:
        """Bytes that the units [first, stop) of a chunk (None: all) keep of a micro-batch until backward."""
        return sum(unit.kept for unit in self.units[chunk][slice(*(units or (None, None)))])

    @property
    def kept(self) -> tuple[tuple[int, ...], ...]:
        """The bytes that each unit keeps of a micro-batch, by chunk and unit."""
        return tuple(tuple(unit.kept for unit in units) for units in self.units)

    def keeping(self, kept: Sequence[Sequence[int]]) -> RankShape:
        """The same with the bytes that each unit keeps of a micro-batch, by chunk and unit."""
        pairs = [zip(*of_chunk, strict=True) for of_chunk in zip(self.units, kept, strict=True)]
        return replace(self, units=tuple(tuple(replace(unit, kept=n) for unit, n in of_chunk) for of_chunk in pairs))


def without_state(units: Iterable[int]) -> RankShape:
    """The shape of a model whose parameters are neither sharded nor trained. units: their number in each chunk."""
    return RankShape(tuple((UnitShape((), (), ()),) * count for count in units), ())
