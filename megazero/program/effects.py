"""What every instruction reads and writes: one table, by which passes, checker, simulator and engine go.

A value is one thing that exists for part of a step: the hidden states that enter a unit, a unit's activations, the
whole parameters of a bucket, its gradient. A value has one writer at a time: an instruction that makes it ends an
absence, and one that takes it ends the value. So most of what can be wrong with a list is an instruction that reads
what is not there, or makes what is there already.

A gradient goes through `GRADIENT` (summed by backwards), `INSIDE` (reduced among the ranks that share the shards, where
others hold the same shard), `REDUCED`, and `SUMMED` (over tp, where it was partial). Each exists only where the next
step needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from megazero.program.instruction import Instruction, Op, Units
from megazero.program.shape import RankShape


class Thing(Enum):
    """The kinds of value."""

    HIDDEN = "the hidden states"
    HIDDEN_GRADIENT = "the gradients of the hidden states"
    ACTIVATIONS = "the activations"
    DEFERRED = "what the weights' backward needs"
    PARAMETERS = "the whole parameters"
    GRADIENT = "the gradient"
    INSIDE = "the gradient reduced among the ranks that share the shards"
    REDUCED = "the reduced gradient"
    SUMMED = "the gradient summed over tp"
    NORM = "the norm"

    __hash__ = object.__hash__  # values are keys: that of Enum takes three times as long


Value = tuple[Thing, int, int, int, int]
"""A kind and where it is, -1 where a number does not apply.

HIDDEN, HIDDEN_GRADIENT    micro-batch, model chunk, unit: those that enter this unit
ACTIVATIONS                micro-batch, own chunk, first unit, stop: one autograd graph
DEFERRED                   micro-batch, own chunk, unit
PARAMETERS to SUMMED       bucket
"""


@dataclass(frozen=True)
class Scope:
    """What the effects of a rank's instructions depend on besides the instruction.

    shape         the rank's units and buckets
    model_chunks  number of chunks of the whole model
    trains        whether forwards are for a backward
    """

    shape: RankShape
    model_chunks: int
    trains: bool = True

    def units_of(self, i: Instruction) -> tuple[int, int]:
        """The units [first, stop) that a computation computes."""
        return i.units or (0, len(self.shape.units[i.chunk]))

    def at_start(self) -> tuple[Value, ...]:
        """The values that are there before the list: parameters that each rank keeps whole. After it they are there
        again, and no others (the norm apart).
        """
        return tuple(_of(Thing.PARAMETERS, b) for b, bucket in enumerate(self.shape.buckets) if not bucket.gathered)


@dataclass(frozen=True, slots=True)
class Effects:
    """needs: values that are read and stay. takes: read, and gone afterwards. makes: new ones. adds: values that are
    made, or grow where they are there already.
    """

    needs: list[Value]
    takes: list[Value]
    makes: list[Value]
    adds: list[Value]


Which = Callable[[Instruction, Scope], Iterator[Value]]


def _of(thing: Thing, bucket: int) -> Value:
    return (thing, bucket, -1, -1, -1)


NORM: Value = (Thing.NORM, -1, -1, -1, -1)


def _position(thing: Thing, i: Instruction, scope: Scope, unit: int) -> Value:
    """A value on the border before a unit. The border behind a chunk's last unit is that before the next chunk."""
    if unit == len(scope.shape.units[i.chunk]):
        return (thing, i.micro_batch, i.model_chunk + 1, 0, -1)
    return (thing, i.micro_batch, i.model_chunk, unit, -1)


def _input(i: Instruction, scope: Scope) -> Iterator[Value]:
    first, _ = scope.units_of(i)
    if i.model_chunk > 0 or first > 0:  # the embedding reads tokens
        yield _position(Thing.HIDDEN, i, scope, first)


def _output(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The hidden states of a forward. The model's last unit makes the loss, from which its backward starts."""
    place = _position(Thing.HIDDEN, i, scope, scope.units_of(i)[1])
    if place[2] < scope.model_chunks:
        yield place
    elif scope.trains:
        yield (Thing.HIDDEN_GRADIENT, *place[1:])


def _output_gradient(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield _position(Thing.HIDDEN_GRADIENT, i, scope, scope.units_of(i)[1])


def _input_gradient(i: Instruction, scope: Scope) -> Iterator[Value]:
    first, _ = scope.units_of(i)
    if i.model_chunk > 0 or first > 0:
        yield _position(Thing.HIDDEN_GRADIENT, i, scope, first)


def _graph(i: Instruction, scope: Scope) -> Iterator[Value]:
    if scope.trains:
        yield (Thing.ACTIVATIONS, i.micro_batch, i.chunk, *scope.units_of(i))


def _deferred(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What the weights' part of a split backward works with. Parameters are not among it: it runs the closures that
    `mpu.linear`, `mpu.fp8_linear` and autograd (for norms) handed to the gradient targets, and these hold the inputs of
    layers and gradients of outputs. Adapters (`mpu.lora`) are such linear layers.
    """
    for unit in range(*scope.units_of(i)):
        yield (Thing.DEFERRED, i.micro_batch, i.chunk, unit, -1)


def parameters_read(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The whole parameters that a computation reads, each once."""
    units, (first, stop) = scope.shape.units[i.chunk], scope.units_of(i)
    forward = i.op is Op.FORWARD
    if stop == first + 1:
        buckets = units[first].forward if forward else units[first].backward
    else:
        buckets = tuple({b: None for unit in units[first:stop] for b in (unit.forward if forward else unit.backward)})
    for bucket in buckets:
        yield _of(Thing.PARAMETERS, bucket)


class ParametersRead:
    """From an instruction to the buckets whose whole parameters it reads (`EFFECTS`), by number, in ascending order.

    Every micro-batch has the same computations. What one of them reads is found once.
    """

    def __init__(self, shape: RankShape) -> None:
        self._scope = Scope(shape, model_chunks=0)  # no parameter depends on the number of chunks
        self._found: dict[tuple[Op, int, Units | None], tuple[int, ...]] = {}

    def __call__(self, i: Instruction) -> tuple[int, ...]:
        key = i.op, i.chunk, i.units
        if key not in self._found:
            values = [value for which in EFFECTS[i.op].needs for value in which(i, self._scope)]
            self._found[key] = tuple(sorted(value[1] for value in values if value[0] is Thing.PARAMETERS))
        return self._found[key]


def _gradients_added(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which a backward adds: once for each unit that does."""
    for unit in range(*scope.units_of(i)):
        for bucket in scope.shape.units[i.chunk][unit].gradients:
            yield _of(Thing.GRADIENT, bucket)


def _gradients_at_once(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which the input's half of a split backward adds: those of tables do not wait."""
    for unit in range(*scope.units_of(i)):
        for bucket in scope.shape.units[i.chunk][unit].at_once:
            yield _of(Thing.GRADIENT, bucket)


def _gradients_in_forward(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which a forward adds: the head makes its table's with the loss."""
    for unit in range(*scope.units_of(i)) if scope.trains else ():
        for bucket in scope.shape.units[i.chunk][unit].in_forward:
            yield _of(Thing.GRADIENT, bucket)


def _buckets(thing: Thing) -> Which:
    """One value for each bucket of an instruction."""
    return lambda i, scope: (_of(thing, bucket) for bucket in i.buckets)


def _after_reduce(i: Instruction, scope: Scope, *, sharded: bool) -> Iterator[Value]:
    for number in i.buckets:
        bucket = scope.shape.buckets[number]
        if bucket.sharded_gradient == sharded:
            yield _of(Thing.INSIDE if bucket.across > 1 else Thing.REDUCED, number)


def _final(i: Instruction, scope: Scope) -> Thing:
    return Thing.SUMMED if scope.shape.sums_partials else Thing.REDUCED


def _finals(i: Instruction, scope: Scope) -> Iterator[Value]:
    return (_of(_final(i, scope), bucket) for bucket in i.buckets)


def _stale(i: Instruction, scope: Scope) -> Iterator[Value]:
    """Whole parameters of which an update writes a shard only."""
    return (_of(Thing.PARAMETERS, b) for b in i.buckets if scope.shape.buckets[b].gathered_after_update)


@dataclass(frozen=True)
class EffectRow:
    """The effects of a kind of instruction (`Effects`), as functions of an instruction and the scope."""

    needs: tuple[Which, ...] = ()
    takes: tuple[Which, ...] = ()
    makes: tuple[Which, ...] = ()
    adds: tuple[Which, ...] = ()


def _arriving(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.HIDDEN, i.micro_batch, i.model_chunk, 0, -1)


def _leaving(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.HIDDEN, i.micro_batch, i.model_chunk + 1, 0, -1)


def _gradient_arriving(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.HIDDEN_GRADIENT, i.micro_batch, i.model_chunk + 1, 0, -1)


def _gradient_leaving(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.HIDDEN_GRADIENT, i.micro_batch, i.model_chunk, 0, -1)


EFFECTS: Mapping[Op, EffectRow] = MappingProxyType(
    {
        Op.RECV_FORWARD: EffectRow(makes=(_arriving,)),
        Op.FORWARD: EffectRow(
            needs=(parameters_read,), takes=(_input,), makes=(_graph, _output), adds=(_gradients_in_forward,)
        ),
        Op.SEND_FORWARD: EffectRow(takes=(_leaving,)),
        Op.RECV_BACKWARD: EffectRow(makes=(_gradient_arriving,)),
        Op.BACKWARD: EffectRow(
            needs=(parameters_read,),
            takes=(_graph, _output_gradient),
            makes=(_input_gradient,),
            adds=(_gradients_added,),
        ),
        Op.BACKWARD_INPUT: EffectRow(
            needs=(parameters_read,),
            takes=(_graph, _output_gradient),
            makes=(_input_gradient, _deferred),
            adds=(_gradients_at_once,),
        ),
        Op.BACKWARD_WEIGHT: EffectRow(takes=(_deferred,), adds=(_gradients_added,)),
        Op.SEND_BACKWARD: EffectRow(takes=(_gradient_leaving,)),
        Op.GATHER: EffectRow(makes=(_buckets(Thing.PARAMETERS),)),
        Op.RELEASE: EffectRow(takes=(_buckets(Thing.PARAMETERS),)),
        Op.REDUCE: EffectRow(
            takes=(_buckets(Thing.GRADIENT),),
            makes=(lambda i, scope: _after_reduce(i, scope, sharded=False),),
            adds=(lambda i, scope: _after_reduce(i, scope, sharded=True),),
        ),
        Op.REDUCE_ACROSS: EffectRow(takes=(_buckets(Thing.INSIDE),), makes=(_buckets(Thing.REDUCED),)),
        Op.REDUCE_PARTIAL: EffectRow(
            takes=(lambda i, scope: (_of(Thing.REDUCED, b) for b in scope.shape.trained),),
            makes=(lambda i, scope: (_of(Thing.SUMMED, b) for b in scope.shape.trained),),
        ),
        Op.NORM: EffectRow(
            needs=(lambda i, scope: (_of(_final(i, scope), b) for b in scope.shape.trained),),
            makes=(lambda i, scope: iter((NORM,)),),
        ),
        Op.UPDATE: EffectRow(needs=(lambda i, scope: iter((NORM,)),), takes=(_finals, _stale)),
    }
)
"""By kind of instruction."""


def effects(i: Instruction, scope: Scope) -> Effects:
    """What an instruction of this rank reads and writes."""
    row = EFFECTS[i.op]
    return Effects(
        [value for which in row.needs for value in which(i, scope)],
        [value for which in row.takes for value in which(i, scope)],
        [value for which in row.makes for value in which(i, scope)],
        [value for which in row.adds for value in which(i, scope)],
    )


def describe(value: Value) -> str:
    """A value in words."""
    thing, *where = value
    first, second, unit, stop = where
    if thing in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT):
        place = f"before unit {unit} of model chunk {second}" if unit else f"before model chunk {second}"
        return f"{thing.value} {place} (micro-batch {first})"
    if thing is Thing.ACTIVATIONS:
        return f"{thing.value} of units {unit} to {stop - 1} of chunk {second} as one graph (micro-batch {first})"
    if thing is Thing.DEFERRED:
        return f"{thing.value} of unit {unit} of chunk {second} (micro-batch {first})"
    return thing.value if first < 0 else f"{thing.value} of bucket {first}"
