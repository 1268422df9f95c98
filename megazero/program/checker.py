"""Refuse lists that would give wrong gradients, too much memory, or no end at all.

`check_list` walks through the list of one role and keeps account of what exists (`program.effects`): an instruction may
only read what is there, make what is not there, and leave nothing behind. Beside it runs the machine of
`program.moves`, which knows where the pieces are that leave a tier. `check` does this for all roles, and checks what
ranks have to agree on: who holds which model chunk, the orders of their messages, and that nobody waits for ever. All
ranks of a role run the same list, and mostly all tp indexes of a stage, so the time that a check takes grows with the
number of stages and not of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from megazero.program.effects import effects
from megazero.program.instruction import RELEASE, UPDATE_HOST, Instruction, Op, ProgramError
from megazero.program.moves import IllegalMove, Moves
from megazero.program.scope import ON_TIME, Border, Scope
from megazero.program.shape import RankShape
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from megazero.program.values import LAST_NORM, NORM, Thing, Value, describe, of_bucket

Role = tuple[int, int]
"""(pipeline stage, tp index): all ranks of a role run the same list."""


def check(
    lists: Mapping[Role, Sequence[Instruction]],
    shapes: Mapping[Role, RankShape],
    micro_batches: int,
    budgets: Mapping[Role, int] | None = None,
    border: Border = ON_TIME,
) -> None:
    """Raise ProgramError for the first fault of a step's lists, of an evaluation's, or of lists of updates alone.

    lists          by role, for all stages and tp indexes that are to be checked, tp 0 of every stage among them
    shapes         by role
    micro_batches  of the step; 0 for lists of updates alone
    budgets        most bytes of gathered parameters, for roles that have a limit
    border         of all lists
    """
    limits = budgets or {}
    stages = 1 + max(stage for stage, _ in lists)
    holders = _holders([lists[stage, 0] for stage in range(stages)]) if micro_batches else {}
    count = len(holders)
    trains = any(i.ends_backward for stage in range(stages) for i in lists[stage, 0])
    for stage in range(stages):
        _check_peers(lists[stage, 0], stage, holders)
        scope = Scope(shapes[stage, 0], count, trains, border)
        check_list(lists[stage, 0], scope, micro_batches, budget=limits.get((stage, 0)), name=f"stage {stage}")
        for role in sorted(role for role in lists if role[0] == stage and role[1] > 0):
            _check_same(lists[stage, 0], lists[role], role)
            if shapes[role] != shapes[stage, 0]:
                scope = Scope(shapes[role], count, trains, border)
                check_list(lists[role], scope, micro_batches, budget=limits.get(role), name=_name(role))
    ranks = [lists[stage, 0] for stage in range(stages)]
    times = ChunkTimes((1.0,) * count, (2.0,) * count)  # any do, and lists of updates alone have no chunk
    simulate(ranks, times, [shapes[stage, 0] for stage in range(stages)], border=border)


def _name(role: Role) -> str:
    return f"stage {role[0]}, tp {role[1]}"


def _holders(lists: Sequence[Sequence[Instruction]]) -> dict[int, int]:
    """The stage of each model chunk. Each must be one stage's, and each of a stage's chunks be one model chunk."""
    holders: dict[int, tuple[int, int]] = {}
    for stage, instructions in enumerate(lists):
        numbers: dict[int, int] = {}
        for number, i in enumerate(instructions):
            if i.chunk < 0:
                continue
            if numbers.setdefault(i.chunk, i.model_chunk) != i.model_chunk:
                what = f"is for model chunk {i.model_chunk}, chunk {i.chunk} is model chunk {numbers[i.chunk]}"
                raise ProgramError(what, f"stage {stage}", number, i)
            holder = holders.setdefault(i.model_chunk, (stage, i.chunk))
            if holder != (stage, i.chunk):
                what = f"is for model chunk {i.model_chunk}, which chunk {holder[1]} of stage {holder[0]} is"
                raise ProgramError(what, f"stage {stage}", number, i)
    missing = set(range(max(holders, default=0) + 1)) - set(holders)
    if missing:
        raise ProgramError(f"no stage holds model chunk {min(missing)}")
    return {chunk: stage for chunk, (stage, _) in holders.items()}


def _check_peers(instructions: Sequence[Instruction], stage: int, holders: Mapping[int, int]) -> None:
    """A message goes to, or comes from, the stage that holds the next or the previous model chunk."""
    for number, i in enumerate(instructions):
        if i.is_transfer:
            chunk = i.boundary + (i.boundary == i.model_chunk)
            if holders.get(chunk) != i.peer:
                on = f"model chunk {chunk} is on stage {holders[chunk]}" if chunk in holders else "nothing is there"
                raise ProgramError(f"has the wrong peer: {on}", f"stage {stage}", number, i)


def _check_same(first: Sequence[Instruction], other: Sequence[Instruction], role: Role) -> None:
    """The tp indexes of a stage have the same list, because every computation has messages among them."""
    if first is other:
        return
    for number, (ours, theirs) in enumerate(zip_longest(first, other)):
        if ours != theirs:
            what = f"comes where stage {role[0]}, tp 0 has {ours or 'its end'}: their messages have different orders"
            if theirs is None:
                raise ProgramError(f"its list ends at number {number}, where tp 0 has {ours}", _name(role))
            raise ProgramError(what, _name(role), number, theirs)


def check_list(
    instructions: Sequence[Instruction],
    scope: Scope,
    micro_batches: int,
    *,
    budget: int | None = None,
    name: str = "this rank",
) -> None:
    """Raise ProgramError for the first fault that one role's list shows by itself. Arguments as in `check`."""
    walk = _Walk(instructions, scope, micro_batches, budget, name)
    for number, i in enumerate(instructions):
        walk.take(number, i)
    walk.finish()


@dataclass
class _Walk:
    """The account of one role's list.

    alive      what exists, with the instruction that made it (or, of a sum, last added to it); -1: there at the start
    ended      what existed, with the instruction that took it
    computed   units that a computation has passed, by (kind, micro-batch, chunk): a forward counts upwards from 0,
               a backward downwards from the last unit
    missing    backwards that have not added to a bucket's gradient yet
    gathered   bytes of gathered parameters
    moves      where the pieces are that leave a tier
    """

    instructions: Sequence[Instruction]
    scope: Scope
    micro_batches: int
    budget: int | None
    name: str
    at: int = -1
    alive: dict[Value, int] = field(default_factory=dict)
    ended: dict[Value, int] = field(default_factory=dict)
    computed: dict[tuple[Op, int, int], int] = field(default_factory=dict)
    missing: Counter[int] = field(default_factory=Counter)
    gathered: int = 0

    def __post_init__(self) -> None:
        self.moves = Moves(self.scope)
        self.alive.update(dict.fromkeys(self.scope.at_start(), -1))
        for units in self.scope.shape.units:
            for unit in units:
                self.missing.update(dict.fromkeys(unit.gradients, self.micro_batches))

    def take(self, number: int, i: Instruction) -> None:
        """The next instruction."""
        self.at = number
        self._check_numbers(i)
        if i.is_compute:
            self._check_units(i)
        does = effects(i, self.scope)
        for value in does.needs:
            if value not in self.alive:
                raise self._absent(value)
        for value in does.takes:
            if value not in self.alive:
                raise self._absent(value)
            del self.alive[value]
            self.ended[value] = number
        for value in does.makes:
            if value in self.alive:
                raise self._refuse(f"makes {describe(value)}, which {self._by(self.alive[value])} made")
            self.alive[value] = number
        for value in does.adds:
            if value[0] is Thing.GRADIENT and self._is_owed(value[1]):
                raise self._refuse(f"adds to {describe(value)}, of which the last step's has still to be used")
            self.alive[value] = number
            if value[0] is Thing.GRADIENT and i.ends_backward:
                self.missing[value[1]] -= 1
        if i.buckets:
            self._check_buckets(i)
        try:
            self.moves.take(i, does)
        except IllegalMove as error:
            raise self._refuse(str(error)) from None

    def _refuse(self, what: str) -> ProgramError:
        return self._fault(self.at, what)

    def _by(self, number: int) -> str:
        """An instruction in words."""
        return "every rank has from the start" if number < 0 else f"number {number}, {self.instructions[number]},"

    def _is_owed(self, bucket: int) -> bool:
        """Whether the last step's gradient of a bucket has still to be used."""
        return any(value in self.alive for value in self.scope.pieces(Thing.OWED, bucket))

    def _absent(self, value: Value) -> ProgramError:
        if value[0] in (Thing.SHARD, Thing.PARAMETERS) and self._is_owed(value[1]):
            return self._refuse(f"reads {describe(value)}, whose update from the last step is still owed")
        if value in self.ended:
            return self._refuse(f"reads {describe(value)}, which {self._by(self.ended[value])} has ended")
        return self._refuse(f"reads {describe(value)}, which no instruction before it has made")

    def _check_numbers(self, i: Instruction) -> None:
        if not -1 <= i.micro_batch < self.micro_batches:
            raise self._refuse(f"is for micro-batch {i.micro_batch} of 0 to {self.micro_batches - 1}")
        for bucket in i.buckets:
            if not 0 <= bucket < len(self.scope.shape.buckets):
                raise self._refuse(f"names bucket {bucket} of {len(self.scope.shape.buckets)}")
            if i.part >= 0 and i.part not in self.scope.shape.buckets[bucket].numbers_of_parts:
                raise self._refuse(f"names part {i.part} of bucket {bucket}, which has no such part")
        if len(set(i.buckets)) < len(i.buckets):
            raise self._refuse("names a bucket twice")

    def _check_units(self, i: Instruction) -> None:
        """Units are computed once and in turn: a forward's from the first, a backward's from the last."""
        count = len(self.scope.shape.units[i.chunk])
        first, stop = self.scope.units_of(i)
        if not 0 <= first < stop <= count:
            raise self._refuse(f"computes units {first} to {stop - 1} of a chunk of {count}")
        kind = i.op if i.op is Op.FORWARD or i.op is Op.BACKWARD_WEIGHT else Op.BACKWARD
        passed = self.computed.get((kind, i.micro_batch, i.chunk), 0)
        expected = passed if kind is Op.FORWARD else count - passed
        if passed == count:
            raise self._refuse("computes units a second time")
        if (first if kind is Op.FORWARD else stop) != expected:
            unit = expected if kind is Op.FORWARD else expected - 1
            raise self._refuse(f"computes its units out of turn: the next is unit {unit}")
        self.computed[kind, i.micro_batch, i.chunk] = passed + stop - first

    def _check_buckets(self, i: Instruction) -> None:
        shape = self.scope.shape
        if i.op == UPDATE_HOST and self.scope.is_early(i) and (more := self._still_to_come(i)):
            raise self._refuse(f"updates before the gradient is complete: {more}")
        for number in i.buckets:
            bucket = shape.buckets[number]
            if i.op is Op.COUNT_GRADIENT and (more := self._still_to_add(number, i.part)):
                raise self._refuse(f"counts the gradient of bucket {number} before it is complete: {more}")
            if i.op is Op.REDUCE and not bucket.lends_gradient and self.missing[number] > 0:
                raise self._refuse(
                    f"reduces the gradient of bucket {number} before it is complete: {self.missing[number]} backwards "
                    "of units have still to add to it"
                )
            if bucket.gathered:
                self.gathered += bucket.parameter_bytes * ((i.op is Op.GATHER) - (i.op == RELEASE))
        if i.op is Op.GATHER and self.budget is not None and self.gathered > self.budget:
            raise self._refuse(f"makes {self.gathered} bytes of gathered parameters, the budget is {self.budget}")

    def _still_to_come(self, i: Instruction) -> str:
        """What has still to come to the gradient that an early update reads, in words; empty if it is complete. Then
        the bucket's last backward is over too, so that no computation of the step reads its parameters any more.
        """
        number, part = i.key
        if self.missing[number] > 0:
            return f"{self.missing[number]} backwards of units have still to add to it"
        squares = of_bucket(Thing.SQUARES, number, part if self.scope.shape.buckets[number].sums.in_files else -1)
        if self.scope.shape.buckets[number].sums_leave and squares not in self.alive:
            return f"nothing has counted {describe(squares)}"
        left = [of_bucket(thing, number) for thing in (Thing.GRADIENT, Thing.INSIDE)]
        return next((f"{describe(value)} has still to be reduced" for value in left if value in self.alive), "")

    def _still_to_add(self, number: int, part: int) -> str:
        """What has still to be added to a sum in words; empty if it is complete."""
        if self.missing[number] > 0:
            return f"{self.missing[number]} backwards of units have still to add to it"
        things = Thing.GRADIENT, Thing.INSIDE, Thing.REDUCED, Thing.SUMMED, Thing.HOST_GRADIENT
        parts = self.scope.shape.buckets[number].numbers_of_parts if part < 0 else (part,)
        left = [of_bucket(thing, number, at) for thing in things for at in (-1, *parts)]
        return next((f"{describe(value)} has still to be added" for value in left if value in self.alive), "")

    def finish(self) -> None:
        """The end of the list: every unit has been computed, and nothing is left."""
        lasting = {*self.scope.at_end(), NORM, LAST_NORM}
        for value in self.scope.at_end():
            if value not in self.alive:
                raise self._lost(value)
        for value, number in self.alive.items():
            if value not in lasting:
                raise self._fault(number, self._leftover(value))
        kinds = (Op.FORWARD, Op.BACKWARD) if self.scope.trains else (Op.FORWARD,)
        for chunk, units in enumerate(self.scope.shape.units):
            for micro_batch in range(self.micro_batches):
                for kind in kinds:
                    if self.computed.get((kind, micro_batch, chunk), 0) < len(units):
                        raise ProgramError(f"no {kind.value} of micro-batch {micro_batch}, chunk {chunk}", self.name)
        try:
            self.moves.finish()
        except IllegalMove as error:
            raise ProgramError(str(error), self.name) from None

    def _lost(self, value: Value) -> ProgramError:
        """What has to be there at the end is not."""
        if value in self.ended:
            return self._fault(self.ended[value], f"ends {describe(value)}, which nothing makes again")
        if self._is_owed(value[1]):
            return ProgramError(f"nothing uses {describe(of_bucket(Thing.OWED, value[1]))}", self.name)
        return ProgramError(f"nothing makes {describe(value)}", self.name)

    def _fault(self, number: int, what: str) -> ProgramError:
        return ProgramError(what, self.name, number, self.instructions[number])

    def _leftover(self, value: Value) -> str:
        end = "which nothing after it reads"
        if value[0] is Thing.GRADIENT and value in self.ended:
            end = f"which {self._by(self.ended[value])} has reduced before it was complete"
        elif value[0] is Thing.GRADIENT:
            end = "which nothing after it reduces"
        elif value[0] is Thing.PARAMETERS:
            end = "which nothing after it releases"
        elif value[0] in (Thing.REDUCED, Thing.SUMMED):
            end = "with which nothing after it updates the weights"
        return f"makes {describe(value)}, {end}"
