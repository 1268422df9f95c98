"""What a checkpoint holds of a model state, in portions: a bucket, or a part of one that rests elsewhere.

Only one portion has to be in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping

import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.zero.fragment import Fragment, StoredFragment
from megazero.zero.layout import BucketFragment
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from megazero.zero.storage import Bucket

SAVED = {"weight": Column.MASTER, "exp_avg": Column.EXP_AVG, "exp_avg_sq": Column.EXP_AVG_SQ}
"""The columns of checkpoints, by their names in a fragment."""


def stored(state: ModelState) -> list[list[StoredFragment]]:
    """The fragments that this rank owns, at any ZeRO stage, by portion. `layout.owned_fragments` lists them by bucket
    for any rank.

    Every tp rank owns the parameters that are replicated over tp: a save needs one of them, a load must fill each.
    """
    dtypes = {name: state.columns[column].dtype for name, column in _saved(state).items()}
    return [
        [StoredFragment(one.spec, one.start, one.stop, dtypes) for one in fragments]
        for _, _, fragments in _portions(state)
    ]


def portions(state: ModelState, fill: Collection[str] = ()) -> Generator[list[Fragment], None, None]:
    """The fragments of `stored` with their values. A portion is valid until the next one is asked for; then the columns
    of `fill` are stored where they rest.

    A collective of all ranks if updates are owed: they are made at once, and not with the first portion.
    """
    state.wait_parameters()
    return _values(state, fill)


def _values(state: ModelState, fill: Collection[str]) -> Generator[list[Fragment], None, None]:
    for index, number, fragments in _portions(state):
        if number < 0:
            views = {name: state.columns[column] for name, column in _saved(state).items()}
            yield [
                _fragment(one, {c: held.view(index, one.offset, one.offset + one.numel) for c, held in views.items()})
                for one in fragments
            ]
            continue
        start = state.host.state_parts[index][number].start
        with state.host.looking((index, number), writes=bool(fill)) as held:
            there = {name: held[column] for name, column in _saved(state).items()}
            yield [
                _fragment(one, {c: t[one.offset - start :][: one.numel] for c, t in there.items()}) for one in fragments
            ]


def _fragment(one: BucketFragment, values: Mapping[str, Tensor]) -> Fragment:
    return Fragment(one.spec, one.start, one.stop, **values)


def _portions(state: ModelState) -> Iterator[tuple[int, int, list[BucketFragment]]]:
    """(bucket, part, fragments) of each portion; -1: of the whole bucket."""
    for index, bucket in enumerate(state.buckets):
        start, stop = bucket.owned
        if not state.host.state_parts[index]:
            yield index, -1, list(bucket.layout.fragments(start, stop))
        for number, part in enumerate(state.host.state_parts[index]):
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                yield index, number, list(bucket.layout.fragments(first, last))


def _saved(state: ModelState) -> dict[str, Column]:
    """The columns of this state; a parameter may be its own master."""
    named = SAVED if state.has_master else SAVED | {"weight": Column.PARAMETER}
    return {name: column for name, column in named.items() if column in state.columns}


@torch.no_grad()
def spread(state: ModelState) -> None:
    """Update parameters and the other ranks' copies from the owners' fragments, which a load has filled.

    Communicates per bucket: an all-gather of every optimizer column over the ranks that store the same shard, and then
    over the neighbours of that of every column that is whole (ZeRO-0), or of the parameters (the other stages). One
    bucket is under way at a time.
    """
    table = state.columns
    for index, bucket in enumerate(state.buckets):
        state.gatherer.wait()
        if state.host.state_parts[index]:
            _spread_parts(state, index)
        else:
            for column in _saved(state).values():
                _spread(bucket, table[column].held(index), sharded=table[column].is_sharded_in(index))
            _round_weights(state, index)
        _gather(state, index)
    state.wait_parameters()


@torch.no_grad()
def round_weights(state: ModelState) -> None:
    """Set the parameters that this rank updates from its master weights, wherever they rest. Communicates nothing.

    `gather_parameters` has to follow on all ranks. Raises DiskError.
    """
    for index in range(len(state.buckets)):
        _round_weights(state, index)


def gather_parameters(state: ModelState) -> None:
    """Bring the parameters that other ranks have set to this rank. Communicates what `spread` does of parameters."""
    for index in range(len(state.buckets)):
        state.gatherer.wait()
        _gather(state, index)
    state.wait_parameters()


def _gather(state: ModelState, index: int) -> None:
    """Start to gather the parameters of a bucket that are whole while only shards of them are updated."""
    if state.has_master and state.weights.is_sharded and not state.parameters[index].gathered:
        state.gatherer.gather(index)


def _round_weights(state: ModelState, index: int) -> None:
    """Set the parameters of a bucket that this rank updates from its master weights."""
    if not state.has_master:
        return
    parameters = state.columns[Column.PARAMETER]
    if not state.host.state_parts[index]:
        parameters.keep(index, state.weights.held(index), state.weights.range_of(index)[0])
    for number, part in enumerate(state.host.state_parts[index]):
        with state.host.looking((index, number)) as held:
            parameters.keep(index, held[Column.MASTER], part.start)


def _spread(bucket: Bucket, held: Tensor, *, sharded: bool) -> None:
    """Bring what other ranks own of a column to this rank. held: all that it stores of the bucket."""
    first = bucket.shard[0] if sharded else 0
    shard, owned = (held[start - first : stop - first] for start, stop in (bucket.shard, bucket.owned))
    collectives.all_gather(shard, owned, bucket.groups.across).wait()
    if not sharded:
        collectives.all_gather(held, shard, bucket.groups.inner).wait()


def _spread_parts(state: ModelState, index: int) -> None:
    """The same for a bucket in parts, of which this rank has all in memory meanwhile if others own something of it. Its
    parameters are set too.
    """
    bucket, host = state.buckets[index], state.host
    first, last = state.weights.range_of(index)
    ranges = [slice(part.start - first, part.stop - first) for part in host.state_parts[index]]
    if bucket.owned == (first, last):
        _round_weights(state, index)
        return
    device = state.weights.device
    whole = {c: torch.empty(last - first, dtype=dtype, device=device) for c, dtype in host.state.items()}
    for number, own in enumerate(ranges):
        with host.looking((index, number)) as held:
            for column, values in whole.items():
                values[own].copy_(held[column])
    for values in whole.values():
        _spread(bucket, values, sharded=state.weights.is_sharded_in(index))
    for number, own in enumerate(ranges):
        with host.looking((index, number), reads=False, writes=True) as held:
            for column, values in whole.items():
                held[column].copy_(values[own])
    state.columns[Column.PARAMETER].keep(index, whole[Column.MASTER], first)
