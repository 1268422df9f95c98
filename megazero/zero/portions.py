"""The values of a model state in portions, a bucket or a part of one that rests elsewhere: initial weights, what a
checkpoint holds, and what a whole step has on disks.

Only one portion has to be in memory at a time: a bucket that does not rest in memory is never whole there.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megazero.disk.lanes import DiskRequest
from megazero.mpu import collectives
from megazero.mpu.random import initialise_range
from megazero.program.instruction import Piece
from megazero.zero.layout import BucketFragment, Fragment, StoredFragment
from megazero.zero.memories import PartSlot
from megazero.zero.mover import PartTensors
from megazero.zero.parts import Key, Range, Resident, piece_name, resident_piece
from megazero.zero.sharding import AS_WEIGHTS, SAVED, Column
from megazero.zero.state import ModelState
from megazero.zero.storage import Bucket

DRAWN = 1 << 24
"""Elements that are drawn at once of what other ranks update, and this one only keeps the parameters of."""


# --- one portion ---------------------------------------------------------------------------------------------------


def parts_at_rest(state: ModelState, index: int) -> list[tuple[int, Range]]:
    """(number, elements) of each part in which what the rank updates of a bucket rests; -1: all of it, in memory."""
    parts = state.resting[index].state_parts
    return [(number, part[:2]) for number, part in enumerate(parts)] or [(-1, state.update_range(index))]


@contextmanager
def looking(state: ModelState, key: Key, *, reads: bool = True, writes: bool = False) -> Iterator[PartTensors]:
    """A context in which the optimizer state of a part of `parts_at_rest` is in memory: zeros at first. A parameter may
    be its own master only where all of it is (-1). Nothing may be under way.

    reads: whether it has the state's values; else its content is undefined. writes: whether it is stored at the end.
    Raises DiskError.
    """
    index, number = key
    slot, parts = state.mover.update_slots.slots[0], state.resting[index].parts
    if number < 0:
        columns, updated = _saved(state).values(), state.update_range(index)
        yield {column: state.columns[column].view(index, *updated) for column in columns}
    elif not parts[number].tier.in_files:
        yield state.mover.state_of(key, slot)
    else:
        store, name = state.tiers.stores[parts[number].tier], piece_name(Piece.STATE, key)
        memory = _state_memory(state, slot, parts[number].stop - parts[number].start)
        if reads and store.has(name):
            store.read({name: memory}).wait()
        elif reads:
            memory.zero_()
        yield state.mover.state_of(key, slot)
        if writes:
            store.write({name: memory}).wait()


def _state_memory(state: ModelState, slot: PartSlot, numel: int) -> Tensor:
    return slot.of(Piece.STATE, numel * state.mover.state_bytes)


# --- initial weights -----------------------------------------------------------------------------------------------


@torch.no_grad()
def initialise_state(state: ModelState, seed: int) -> None:
    """Set the initial weights, which are the same on every layout: the master weight, and the parameter rounded once.
    Moments in parts become zero, and averages begin as the weights.

    Frozen parameters are not set. Communicates nothing. Memory: a part of a bucket. Raises DiskError.
    """
    state.wait_parameters()
    parameters = state.columns[Column.PARAMETER]
    for index, bucket in enumerate(state.buckets):
        (start, stop), (first, last) = parameters.range_of(index), state.weights.range_of(index)
        parts = state.resting[index].state_parts
        for number, part in enumerate(parts):
            with looking(state, (index, number), reads=False, writes=True) as held:
                for values in held.values():
                    values.zero_()
                _draw(held[Column.MASTER], bucket, part.start, seed)
                _begin_as_weights(state, held, AS_WEIGHTS)
                parameters.keep(index, held[Column.MASTER], part.start)
        if not parts:
            weights = state.weights.held(index)
            _draw(weights, bucket, first, seed)
            if state.has_master:
                parameters.keep(index, weights, first)
            with looking(state, (index, -1)) as held:
                _begin_as_weights(state, held, AS_WEIGHTS)
        for others in ((start, first), (last, stop)):
            for at in range(*others, DRAWN):
                numel = min(DRAWN, others[1] - at)
                values = torch.empty(numel, dtype=state.weights.dtype, device=state.weights.device)
                _draw(values, bucket, at, seed)
                parameters.keep(index, values, at)


def _begin_as_weights(state: ModelState, held: PartTensors, columns: Collection[Column]) -> None:
    """Set those of these columns that the state has to the weights that a part holds."""
    for column in held.keys() & columns:
        held[column].copy_(held[_saved(state)["weight"]])


def _draw(out: Tensor, bucket: Bucket, start: int, seed: int) -> None:
    """Fill `out` [n] with the initial values of a bucket's elements from `start` on; those of no parameter are zero."""
    stop = start + out.numel()
    out.zero_()
    for fragment in bucket.layout.fragments(start, stop):
        values = out[fragment.offset - start :][: fragment.numel]
        initialise_range(values, fragment.spec, fragment.start, seed)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def stored(state: ModelState) -> list[list[StoredFragment]]:
    """The fragments that this rank owns, at any ZeRO stage, by portion. `layout.owned_fragments` lists them by bucket
    for any rank.

    Every tp rank owns the parameters that are replicated over tp: a save needs one of them, a load must fill each.
    """
    dtypes = {name: state.columns[column].dtype for name, column in _saved(state).items()}
    return [
        [StoredFragment(fragment.spec, fragment.start, fragment.stop, dtypes) for fragment in fragments]
        for _, _, fragments in _portions(state)
    ]


def portions(
    state: ModelState, fill: Collection[str] = (), only: Collection[str] | None = None
) -> Generator[list[Fragment], None, None]:
    """The fragments of `stored` with their values. A portion is valid until the next one is asked for; then the columns
    of `fill` are stored where they rest.

    only: names of parameters, without which a portion is left out; None: none is.

    A collective of all ranks if updates are owed: they are made at once, and not with the first portion.
    """
    state.wait_parameters()
    return _values(state, fill, only)


def _values(
    state: ModelState, fill: Collection[str], only: Collection[str] | None
) -> Generator[list[Fragment], None, None]:
    for key, start, fragments in _portions(state):
        if only is not None and not any(fragment.spec.name in only for fragment in fragments):
            continue
        with looking(state, key, writes=bool(fill)) as held:
            columns = {name: held[column] for name, column in _saved(state).items()}
            yield [
                Fragment(
                    fragment.spec,
                    fragment.start,
                    fragment.stop,
                    {name: values[fragment.offset - start :][: fragment.numel] for name, values in columns.items()},
                )
                for fragment in fragments
            ]


def _portions(state: ModelState) -> Iterator[tuple[Key, int, list[BucketFragment]]]:
    """(bucket and part, its first element, fragments) of each portion."""
    for index, bucket in enumerate(state.buckets):
        start, stop = bucket.owned
        for number, (first, last) in parts_at_rest(state, index):
            if max(start, first) < min(stop, last):
                yield (index, number), first, list(bucket.layout.fragments(max(start, first), min(stop, last)))


def _saved(state: ModelState) -> dict[str, Column]:
    """The columns of this state; a parameter may be its own master."""
    named = SAVED if state.has_master else {**SAVED, "weight": Column.PARAMETER}
    return {name: column for name, column in named.items() if column in state.columns}


@torch.no_grad()
def spread(state: ModelState, filled: Collection[str], only: Collection[str] | None = None) -> None:
    """Update parameters and the other ranks' copies from the owners' fragments, of which a load has filled these
    columns. What begins as the weights and is not filled becomes equal to them. only: names of parameters, without
    which a bucket is left out; None: none is.

    Communicates per bucket: an all-gather of every optimizer column over the ranks that store the same shard, and then
    over the neighbours of that of every column that is whole (ZeRO-0), or of the parameters (the other stages). One
    bucket is under way at a time.
    """
    table = state.columns
    begin = [column for column in AS_WEIGHTS if column in table and column.value not in filled]
    for index, bucket in enumerate(state.buckets):
        if only is not None and not any(entry.spec.name in only for entry in bucket.layout.entries):
            continue
        for number, _ in parts_at_rest(state, index) if begin else ():
            # Ahead of what brings the other ranks' parts of all columns: here the owned part alone has its weights.
            with looking(state, (index, number), writes=True) as held:
                _begin_as_weights(state, held, begin)
        state.gatherer.wait()
        if state.resting[index].state_parts:
            _spread_parts(state, index)
        else:
            for column in _saved(state).values():
                _spread(bucket, table[column].held(index), sharded=table[column].is_sharded_in(index))
            _round_weights(state, index)
        _gather(state, index)
    state.wait_parameters()


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
    bucket, weights, parts = state.buckets[index], state.weights, parts_at_rest(state, index)
    first, last = weights.range_of(index)
    if bucket.owned == (first, last):
        _round_weights(state, index)
        return
    dtypes = state.mover.state_dtypes.items()
    whole = {column: torch.empty(last - first, dtype=dtype, device=weights.device) for column, dtype in dtypes}
    for number, (start, stop) in parts:
        with looking(state, (index, number)) as held:
            for column, values in whole.items():
                values[start - first : stop - first].copy_(held[column])
    for values in whole.values():
        _spread(bucket, values, sharded=weights.is_sharded_in(index))
    for number, (start, stop) in parts:
        with looking(state, (index, number), reads=False, writes=True) as held:
            for column, values in whole.items():
                held[column].copy_(values[start - first : stop - first])
    state.columns[Column.PARAMETER].keep(index, whole[Column.MASTER], first)


@torch.no_grad()
def round_weights(state: ModelState) -> None:
    """Set the parameters that this rank updates from its master weights, wherever they rest. Communicates nothing.

    `gather_parameters` has to follow on all ranks. Raises DiskError.
    """
    for index in range(len(state.buckets)):
        _round_weights(state, index)


def _round_weights(state: ModelState, index: int) -> None:
    """Set the parameters of a bucket that this rank updates from its master weights."""
    for number, (start, _) in parts_at_rest(state, index) if state.has_master else ():
        with looking(state, (index, number)) as held:
            state.columns[Column.PARAMETER].keep(index, held[Column.MASTER], start)


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


# --- whole steps on disks (--nvme-checkpoint) ----------------------------------------------------------------------


def flip(state: ModelState, step: int, about: Mapping[str, Any]) -> DiskRequest:
    """Start to make what all parts have become a whole step on disks (`disk.swap`), with what is kept about it."""
    ring = state.mover.update_slots
    ring.assert_idle()
    for number, resident in enumerate(state.residents):
        slot = ring.slots[number % len(ring.slots)]
        for end in slot.ends:
            end()
        for values, copy in _copies(state, resident, slot):
            copy.copy_(values)
        memory = _state_memory(state, slot, resident.stop - resident.start)
        slot.ends = [state.tiers.disks.write({resident_piece(resident): memory}).wait]
    return state.tiers.disks.flip(step, about)


def read_residents(state: ModelState) -> None:
    """Set what rests on the device from the swap files. Nothing may be under way. Raises DiskError."""
    slot = state.mover.update_slots.slots[0]
    for resident in state.residents:
        memory = _state_memory(state, slot, resident.stop - resident.start)
        state.tiers.disks.read({resident_piece(resident): memory}).wait()
        for values, copy in _copies(state, resident, slot):
            values.copy_(copy)


def _copies(state: ModelState, resident: Resident, slot: PartSlot) -> list[tuple[Tensor, Tensor]]:
    """For each column what rests on the device, and its place in a slot."""
    copies = state.mover.state_in(slot, resident.stop - resident.start)
    return [
        (state.columns[column].view(resident.bucket, resident.start, resident.stop), copy)
        for column, copy in copies.items()
    ]
