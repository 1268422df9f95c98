"""Where the pieces of a rank's memory are that leave a tier, and the moves that are legal: a state machine.

A piece rests on a tier, is on its way to one, or is in use on one. `LEGAL` is the whole machine: from an instruction
and where it finds a piece to where it leaves it. What is not in the table is illegal. The walk of `program.checker`
runs it over every list beside the account of values. That account knows whether a value exists. The machine knows where
the bytes are: so it refuses a computation on what is on its way out, a second move of what moves, and a slot of host
memory that another part has not left.

A lane waits for what is on its way to it. So an update may follow a read in the list that is not over: the update comes
later. Nothing waits for what is on its way elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.tiers import FILE_TIERS, Tier
from megazero.program.instruction import (
    LEAVE,
    LOAD,
    STATE_READS,
    UPDATE,
    UPDATE_HOST,
    Free,
    Instruction,
    Kind,
    Op,
    Piece,
    TierMove,
    Update,
    reads_of,
    writes_of,
)
from megazero.program.passes.slots import Tenant, tenant_of, way_through
from megazero.program.scope import Scope
from megazero.program.values import Effects, Thing, Value, describe, of_bucket


class Doing(Enum):
    """What a piece does."""

    RESTS = "rest"
    MOVES = "are on their way to"
    COMPUTES = "are in use"

    __hash__ = object.__hash__


class Standing(NamedTuple):
    """What a piece does, and on which tier."""

    doing: Doing
    tier: Tier

    def __str__(self) -> str:
        if self.doing is Doing.MOVES:
            return f"{self.doing.value} {_TIERS[self.tier].removeprefix('in ').removeprefix('on ')}"
        return f"{self.doing.value} {_TIERS[self.tier]}"


_TIERS = {
    Tier.DEVICE: "on the device",
    Tier.HOST: "in host memory",
    **{tier: row.place for tier, row in FILE_TIERS.items()},
}
ON_DEVICE, ON_HOST = Standing(Doing.RESTS, Tier.DEVICE), Standing(Doing.RESTS, Tier.HOST)
TO_DEVICE, TO_HOST = Standing(Doing.MOVES, Tier.DEVICE), Standing(Doing.MOVES, Tier.HOST)
IN_FILES = tuple(Standing(Doing.RESTS, tier) for tier in FILE_TIERS)
TO_FILES = tuple(Standing(Doing.MOVES, tier) for tier in FILE_TIERS)
USED_ON_DEVICE, USED_ON_HOST = Standing(Doing.COMPUTES, Tier.DEVICE), Standing(Doing.COMPUTES, Tier.HOST)


_ADDERS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_READERS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.GATHER)
_FIRST_SUM = TierMove(Piece.SUMS, Tier.DEVICE, Tier.HOST)


def _from_home(move: TierMove) -> dict[Standing, Standing]:
    """A piece leaves its home to be used. One that still comes home may be sent out again: its lanes keep the order."""
    to = Standing(Doing.MOVES, move.destination)
    return {Standing(Doing.RESTS, move.source): to, Standing(Doing.MOVES, move.source): to}


def _after_use(move: TierMove) -> dict[Standing, Standing]:
    """A piece comes home from where it was used."""
    return {Standing(Doing.COMPUTES, move.source): Standing(Doing.MOVES, move.destination)}


_STORED = TierMove(Piece.UPDATED, Tier.DEVICE, Tier.HOST)
# A gradient that is used from files or host memory is the sum that rests there.
_BRINGS_TO_USE = {
    **dict.fromkeys(STATE_READS, Piece.STATE),
    **dict.fromkeys(reads_of(Piece.SUMS) | reads_of(Piece.GRADIENTS), Piece.SUMS),
}
_BRINGS_HOME = {
    **dict.fromkeys(writes_of(Piece.STATE), Piece.STATE),
    **dict.fromkeys(writes_of(Piece.SUMS), Piece.SUMS),
    TierMove(Piece.UPDATED, Tier.HOST, Tier.DEVICE): Piece.PARAMETERS,
    _STORED: Piece.PARAMETERS,
}
LEGAL: Mapping[tuple[Kind, Piece], Mapping[Standing, Standing | None]] = MappingProxyType(
    {
        **{(move, piece): _from_home(move) for move, piece in _BRINGS_TO_USE.items()},
        **{(move, piece): _after_use(move) for move, piece in _BRINGS_HOME.items()},
        **{
            (move, Piece.PARAMETERS): dict.fromkeys((USED_ON_HOST, TO_HOST), Standing(Doing.MOVES, move.destination))
            for move in writes_of(Piece.UPDATED)
        },
        (UPDATE_HOST, Piece.STATE): {TO_HOST: USED_ON_HOST, ON_HOST: ON_HOST},
        (UPDATE, Piece.STATE): {ON_DEVICE: ON_DEVICE},
        **{
            (TierMove(piece, Tier.DEVICE, Tier.HOST), Piece.GRADIENTS): {ON_DEVICE: TO_HOST}
            for piece in (Piece.GRADIENTS, Piece.REDUCED)
        },
        (UPDATE_HOST, Piece.GRADIENTS): {TO_HOST: ON_DEVICE},  # the copy is used up
        (UPDATE, Piece.GRADIENTS): {ON_DEVICE: ON_DEVICE},
        (Op.ADD_GRADIENT, Piece.GRADIENTS): {TO_HOST: ON_DEVICE},
        **{(op, Piece.GRADIENTS): {ON_DEVICE: ON_DEVICE} for op in (*_ADDERS, _FIRST_SUM)},
        (_FIRST_SUM, Piece.SUMS): {ON_HOST: ON_HOST, **dict.fromkeys(IN_FILES, USED_ON_HOST)},
        (Op.ADD_GRADIENT, Piece.SUMS): {ON_HOST: ON_HOST, TO_HOST: USED_ON_HOST},
        (Op.COUNT_GRADIENT, Piece.SUMS): {ON_HOST: ON_HOST, USED_ON_HOST: USED_ON_HOST},
        **{
            (kind, Piece.SUMS): {ON_HOST: ON_HOST, TO_HOST: None}  # a copy of them moves
            for kind in (UPDATE_HOST, TierMove(Piece.GRADIENTS, Tier.HOST, Tier.DEVICE))
        },
        (UPDATE_HOST, Piece.PARAMETERS): {ON_HOST: ON_HOST, **dict.fromkeys((ON_DEVICE, *IN_FILES), USED_ON_HOST)},
        (UPDATE, Piece.PARAMETERS): {ON_DEVICE: ON_DEVICE, **dict.fromkeys((ON_HOST, *IN_FILES), USED_ON_DEVICE)},
        **{
            (move, Piece.PARAMETERS): dict.fromkeys(
                (Standing(Doing.RESTS, move.source), Standing(Doing.MOVES, move.source)),
                Standing(Doing.RESTS, move.source),  # a copy of them moves
            )
            for move in reads_of(Piece.PARAMETERS)
        },
        (LOAD, Piece.PARAMETERS): {ON_HOST: ON_HOST, TO_HOST: ON_HOST, **{at_rest: at_rest for at_rest in IN_FILES}},
        **{(op, Piece.PARAMETERS): {ON_DEVICE: ON_DEVICE, TO_DEVICE: ON_DEVICE} for op in _READERS},
        (LEAVE, Piece.ACTIVATIONS): {ON_DEVICE: TO_HOST},
        (Free(Piece.ACTIVATIONS, Tier.DEVICE), Piece.ACTIVATIONS): {TO_HOST: ON_HOST},
        (TierMove(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE), Piece.ACTIVATIONS): {ON_HOST: TO_DEVICE},
        **{
            (op, Piece.ACTIVATIONS): {ON_DEVICE: ON_DEVICE, TO_DEVICE: ON_DEVICE}
            for op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        },
    }
)
"""The legal moves; None: to where the piece rests. What a backward has used is gone: its next forward finds the place
as if nothing had left it.
"""
AT_THE_END = {
    Piece.STATE: {*TO_FILES},
    Piece.GRADIENTS: set[Standing](),
    Piece.SUMS: {*TO_FILES},
    Piece.PARAMETERS: {TO_DEVICE, TO_HOST, *TO_FILES},
    Piece.ACTIVATIONS: set[Standing](),
}
"""Where a piece may be at the end of a list instead of at home: it arrives beside the next list."""
_OF_A_PART = (Piece.STATE, Piece.GRADIENTS, Piece.SUMS, Piece.PARAMETERS)
_OF_A_VALUE = {
    Thing.SHARD: Piece.PARAMETERS,
    Thing.PARAMETERS: Piece.PARAMETERS,
    Thing.GRADIENT: Piece.GRADIENTS,
    Thing.ACTIVATIONS: Piece.ACTIVATIONS,
}
"""The pieces that an instruction on no part reads or adds to, by the values of its effects."""


class IllegalMove(Exception):
    """An instruction finds a piece where it may not move or use it. The message says what of it is wrong."""


class Moves:
    """The machine on its way through a rank's list.

    away   the pieces that are not at home, and the instruction that moved them last (None: it stands in the list
           before). At home optimizer state and
           parameters rest on their tiers, and all else on the device
    slots  who has taken a slot of host memory and not left it, by its ring (whether it is of parameters that are read)
           and number
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.away: dict[tuple[Piece, Value], tuple[Standing, Instruction | None]] = {}
        held = scope.held_at_start
        for key in held:
            self.away[Piece.STATE, of_bucket(Thing.SHARD, *key)] = TO_HOST, None
        self.slots = {(False, slot): Tenant(False, False, key) for slot, key in enumerate(held)}

    def take(self, i: Instruction, does: Effects) -> None:
        """The next instruction, and what it reads and writes. Raises IllegalMove."""
        for piece, where in self._pieces(i, does) if i.part >= 0 or self.away or i.op == LEAVE else ():
            legal = LEGAL[i.op, piece]
            home = self._home(piece, where)
            stands, mover = self.away.get((piece, where), (home, None))
            if stands not in legal:
                before = "" if mover is None else f" since {mover}"
                may = " or ".join(map(str, legal))
                raise IllegalMove(f"finds that {_named(piece, where)} {stands}{before}: legal where they {may}")
            after = legal[stands]
            if after is None or after == home:
                self.away.pop((piece, where), None)
            else:
                self.away[piece, where] = after, i
        if i.part >= 0:
            self._slot(i)

    def finish(self) -> None:
        """The end of the list. Raises IllegalMove where a piece has not come home, and is not on its last way there."""
        for (piece, where), (stands, mover) in self.away.items():
            if stands not in AT_THE_END[piece] and not self._is_read_ahead(piece, where):
                raise IllegalMove(f"leaves {_named(piece, where)} where they {stands} ({mover})")

    def _is_read_ahead(self, piece: Piece, where: Value) -> bool:
        """Whether the next list uses a piece that this one has begun to read."""
        ahead = self.scope.shape.read_ahead if self.scope.border.leaves and self.scope.border.ahead else ()
        return piece is Piece.STATE and self.away[piece, where][0] == TO_HOST and where[1:3] in ahead

    def _pieces(self, i: Instruction, does: Effects) -> Iterator[tuple[Piece, Value]]:
        """The pieces that an instruction moves or uses."""
        if i.part >= 0:
            for kind in _OF_A_PART:
                if (i.op, kind) in LEGAL and self._concerns(i, kind):
                    yield kind, of_bucket(Thing.SHARD, i.buckets[0], i.part)
            return
        for value in (*does.needs, *does.takes, *does.makes, *does.adds):
            piece = _OF_A_VALUE.get(value[0])
            if piece is None or (i.op, piece) not in LEGAL:
                continue
            if piece is Piece.ACTIVATIONS:
                yield piece, value
            elif value[2] >= 0:
                yield piece, of_bucket(Thing.SHARD, value[1], value[2])
            elif piece is Piece.GRADIENTS:
                parts = range(len(self.scope.shape.buckets[value[1]].parts))
                yield from ((piece, of_bucket(Thing.SHARD, value[1], part)) for part in parts)

    def _concerns(self, i: Instruction, kind: Piece) -> bool:
        """Whether a bucket has such pieces there: an update reads the sum of gradients if that is not on the device."""
        updates = isinstance(i.op, Update)
        if kind is Piece.SUMS or (kind is Piece.GRADIENTS and updates):
            return self.scope.shape.buckets[i.buckets[0]].sums_leave is (kind is Piece.SUMS)
        return True

    def _home(self, piece: Piece, where: Value) -> Standing:
        if piece is Piece.STATE:
            return Standing(Doing.RESTS, self.scope.shape.buckets[where[1]].parts[where[2]].tier)
        if piece is Piece.PARAMETERS:
            return Standing(Doing.RESTS, self.scope.shape.buckets[where[1]].rests)
        if piece is Piece.SUMS:
            return Standing(Doing.RESTS, self.scope.shape.buckets[where[1]].sums)
        return ON_DEVICE

    def _slot(self, i: Instruction) -> None:
        """A part has one slot of a ring at a time, and keeps it until it has gone its whole way."""
        uses, tenant = way_through(i, self.scope.shape), tenant_of(i)
        slot = tenant.loads, i.slot
        if not uses and i.slot < 0:
            return
        slots = self.scope.shape.slots
        if not uses or not 0 <= i.slot < slots:
            raise IllegalMove(f"names slot {i.slot} of {slots}, and needs {'one' if uses else 'none'}")
        if i.frees_slot is not (i.op == uses[-1]):
            does = "frees" if i.frees_slot else "keeps"
            raise IllegalMove(f"{does} slot {i.slot}; its part is there until {uses[-1].value}")
        holder = self.slots.get(slot)
        if holder is None and tenant in self.slots.values():
            raise IllegalMove(f"takes slot {i.slot}, and its part has another one")
        if holder is not None and holder != tenant:
            bucket, part = holder.key
            raise IllegalMove(f"takes slot {i.slot} of {slots}, which part {part} of bucket {bucket} has not left")
        self.slots[slot] = tenant
        if i.frees_slot:
            del self.slots[slot]


def _named(piece: Piece, where: Value) -> str:
    """A piece in words."""
    return describe(where) if piece is Piece.ACTIVATIONS else f"{piece.value} of part {where[2]} of bucket {where[1]}"
