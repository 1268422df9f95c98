"""The memory through which the ranks of a host exchange tensors (`mpu.exchange`), as far as a rank touches it.

Only pages that a process has written or read are in its memory. By far not all of a slot is: of a reduce-scatter a rank
writes the rows of the others and reads its own row of theirs, of a folded sum it reads its part and the sums of the
others. Slots are used in turn, so after some steps each of them has carried every message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.parameter import StateGroup
from megazero.mpu.shared_memory import SLOT, SLOTS
from megazero.mpu.transfers import FOLD_FROM
from megazero.plan.rank_state import stage_state
from megazero.plan.recompute import activation_plan
from megazero.program.shape import BucketShape

Ranks = tuple[int, ...]
Range = tuple[int, int]
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"


@dataclass(frozen=True)
class SharedMessage:
    """A collective of a group. nbytes: of the summed tensor, of a reduce-scatter's input, of a gather's output."""

    kind: str
    ranks: Ranks
    nbytes: int

    def touched(self, member: int) -> Iterator[Range]:
        """The bytes of a member's slot that the first rank of the group writes or reads."""
        size, chunk = len(self.ranks), min(SLOT, self.nbytes)
        if self.kind == ALL_GATHER:
            yield 0, min(SLOT, self.nbytes // size)
        elif self.kind == REDUCE_SCATTER:
            yield (0, chunk // size) if member else (chunk // size, chunk)
        elif member and size > 2 and chunk >= FOLD_FROM:
            yield 0, chunk // size
            yield member * chunk // size, (member + 1) * chunk // size
        else:
            yield 0, chunk


def shared_bytes(run: Run, axes: Axes) -> int:
    """Bytes of the memory through which the groups of the first rank exchange tensors, as far as it touches them."""
    if not run.parallel.shared_memory:
        return 0
    by_group: dict[Ranks, set[SharedMessage]] = {}
    for sent in {*_activations(run, axes), *_state(run, axes)}:
        if len(sent.ranks) > 1:
            by_group.setdefault(sent.ranks, set()).add(sent)
    return sum(
        SLOTS * covered([part for sent in of_group for part in sent.touched(member)])
        for ranks, of_group in by_group.items()
        for member in range(len(ranks))
    )


def covered(ranges: list[Range]) -> int:
    """The bytes that are in any of these ranges."""
    total, end = 0, 0
    for start, stop in sorted(ranges):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _activations(run: Run, axes: Axes) -> Iterator[SharedMessage]:
    """What tensor-parallel ranks send each other of hidden states. Sums of the loss are smaller."""
    ranks, hidden = axes.tensor_ranks(Coordinates(0, 0, 0, 0)), activation_plan(run, "cpu").hidden_bytes
    if run.parallel.sequence_parallel:  # a rank has a part of them
        whole = hidden * len(ranks)
        yield SharedMessage(ALL_GATHER, ranks, whole)
        yield SharedMessage(REDUCE_SCATTER, ranks, whole)
    else:
        yield SharedMessage(ALL_REDUCE, ranks, hidden)


def _state(run: Run, axes: Axes) -> Iterator[SharedMessage]:
    """What ranks send each other of the gradients and parameters of the first stage."""
    at = Coordinates(0, 0, 0, 0)
    for bucket in stage_state(run, axes, 0).shape.buckets:
        kind = StateGroup.TIED if bucket.spans_stages else StateGroup.REPLICAS
        yield from _of_bucket(bucket, axes.inner_ranks(kind, at), axes.across_ranks(kind, at))


def _of_bucket(bucket: BucketShape, inner: Ranks, across: Ranks) -> Iterator[SharedMessage]:
    sent = bucket.messages
    if bucket.trained:
        scatters = bucket.sharded_state or len(across) > 1
        yield SharedMessage(REDUCE_SCATTER if scatters else ALL_REDUCE, inner, sent.scatter)
        yield SharedMessage(ALL_REDUCE, across, sent.across_scatter)
        if scatters and not bucket.sharded_state:
            yield SharedMessage(ALL_GATHER, inner, sent.gather)
    if bucket.sharded_state or bucket.is_sharded:
        yield SharedMessage(ALL_GATHER, inner, sent.parameters)
