"""What every instruction reads and writes: one table, by which passes, checker, simulator and engine go.

A value is one thing that exists for part of a step: the hidden states that enter a unit, a unit's activations, the
whole parameters of a bucket, its gradient. A value has one writer at a time: an instruction that makes it ends an
absence, and one that takes it ends the value. So most of what can be wrong with a list is an instruction that reads
what is not there, or makes what is there already.

A gradient goes through `GRADIENT` (summed by backwards), `INSIDE` (reduced among the ranks that share the shards, where
others hold the same shard), `REDUCED`, and `SUMMED` (over tp, where it was partial). Each exists only where the next
step needs it. With late updates (`program.border`) what a list leaves is `OWED` in the next one. A bucket whose update
is owed has no `SHARD` and no `PARAMETERS` that something could read.

A bucket may be updated in parts, some of them in host memory. From its last reduction to its next use each part has
values of its own: gradient, `SHARD`, and `PARAMETERS` unless ranks gather them.

Activations that leave the device are `HOST_ACTIVATIONS` too from LEAVE on, and these alone from FREE to RETURN. So no
backward can come before its RETURN, and nothing can be freed that is not on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Op, Units
from megazero.program.scope import Scope
from megazero.program.shape import RankShape
from megazero.program.values import LAST_NORM, NORM, Thing, Value, of_bucket


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


def _on_host(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.HOST_ACTIVATIONS, i.micro_batch, i.chunk, *scope.units_of(i))


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
        yield from scope.whole(bucket)


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
            self._found[key] = tuple(sorted({value[1] for value in values if value[0] is Thing.PARAMETERS}))
        return self._found[key]


def _gradients_added(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which a backward adds: once for each unit that does."""
    for unit in range(*scope.units_of(i)):
        for bucket in scope.shape.units[i.chunk][unit].gradients:
            yield of_bucket(Thing.GRADIENT, bucket)


def _gradients_at_once(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which the input's half of a split backward adds: those of tables do not wait."""
    for unit in range(*scope.units_of(i)):
        for bucket in scope.shape.units[i.chunk][unit].at_once:
            yield of_bucket(Thing.GRADIENT, bucket)


def _gradients_in_forward(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients to which a forward adds: the head makes its table's with the loss."""
    for unit in range(*scope.units_of(i)) if scope.trains else ():
        for bucket in scope.shape.units[i.chunk][unit].in_forward:
            yield of_bucket(Thing.GRADIENT, bucket)


def _buckets(thing: Thing) -> Which:
    """One value for each bucket of an instruction."""
    return lambda i, scope: (of_bucket(thing, bucket) for bucket in i.buckets)


def _after_reduce(i: Instruction, scope: Scope, *, sharded: bool) -> Iterator[Value]:
    for number in i.buckets:
        bucket = scope.shape.buckets[number]
        if bucket.sharded_gradient == sharded:
            inside = bucket.across > 1
            yield from (of_bucket(Thing.INSIDE, number),) if inside else scope.pieces(Thing.REDUCED, number)


def _pieces(thing: Thing) -> Which:
    """The values of all parts of the buckets of an instruction."""
    return lambda i, scope: (value for bucket in i.buckets for value in scope.pieces(thing, bucket))


def _piece(thing: Thing) -> Which:
    """The value of the part of an instruction, in each of its buckets."""
    return lambda i, scope: (of_bucket(thing, bucket, i.part) for bucket in i.buckets)


def _of_trained(thing: Thing) -> Which:
    """The values of all parts of all trained buckets."""
    return lambda i, scope: (value for bucket in scope.shape.trained for value in scope.pieces(thing, bucket))


def _norm_of_update(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield LAST_NORM if scope.border.is_late else NORM


def _final(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradient that an update uses up."""
    yield from _piece(Thing.OWED if scope.border.is_late else scope.final)(i, scope)


def _stale(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What an update in time makes stale before something else is there: what a copy will bring, and whole parameters
    of which a rank writes a shard only. With late updates they are not there.
    """
    for number in () if scope.border.is_late else i.buckets:
        if i.op is Op.UPDATE_HOST or scope.shape.buckets[number].is_loaded:
            yield from _renewed(i, scope)
        if scope.shape.buckets[number].gathered_after_update and i.part <= 0:
            yield of_bucket(Thing.PARAMETERS, number)


def _updated(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What an update on the device makes: weights from which the parameters are stored that do not rest there. A late
    one makes all other parameters too, which something may read then.
    """
    if scope.shape.buckets[i.buckets[0]].is_loaded:
        yield from _piece(Thing.NEW_WEIGHTS)(i, scope)
    elif scope.border.is_late:
        yield from _renewed(i, scope)


def _updated_there(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What an update in host memory makes, and a copy of updated weights there: parameters on their way, or at rest if
    they rest there.
    """
    rests = scope.shape.buckets[i.buckets[0]].rests
    yield from _renewed(i, scope) if rests is Tier.HOST else _piece(Thing.NEW_PARAMETERS)(i, scope)


def _in_memory(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a load reads of a bucket that rests in host memory."""
    if scope.shape.buckets[i.buckets[0]].rests is Tier.HOST:
        yield from _pieces(Thing.SHARD)(i, scope)


def _was_read(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a load uses up of one that rests on disks."""
    if scope.shape.buckets[i.buckets[0]].rests is Tier.DISK:
        yield from _piece(Thing.HOST_PARAMETERS)(i, scope)


def _on_device(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a gather reads that rests on the device."""
    for number in i.buckets:
        yield from () if scope.shape.buckets[number].is_loaded else scope.pieces(Thing.SHARD, number)


def _loaded(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a gather uses up that has been loaded."""
    for number in i.buckets:
        bucket = scope.shape.buckets[number]
        for part in bucket.loads if bucket.is_loaded else ():
            yield of_bucket(Thing.LOADED, number, part)


def _renewed(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The parameters of a part that has been updated."""
    for number in i.buckets:
        yield of_bucket(Thing.SHARD, number, i.part)
        bucket = scope.shape.buckets[number]
        if not bucket.gathered and not bucket.gathered_after_update:
            yield of_bucket(Thing.PARAMETERS, number, i.part)


def _on_disk(thing: Thing) -> Which:
    """The value of the part of an instruction, where its optimizer state rests on disks."""

    def which(i: Instruction, scope: Scope) -> Iterator[Value]:
        for number in i.buckets:
            if scope.shape.buckets[number].parts[i.part].tier is Tier.DISK:
                yield of_bucket(thing, number, i.part)

    return which


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
        Op.READ_PARAMETERS: EffectRow(needs=(_piece(Thing.SHARD),), makes=(_piece(Thing.HOST_PARAMETERS),)),
        Op.LOAD: EffectRow(needs=(_in_memory,), takes=(_was_read,), makes=(_piece(Thing.LOADED),)),
        Op.GATHER: EffectRow(needs=(_on_device,), takes=(_loaded,), makes=(_buckets(Thing.PARAMETERS),)),
        Op.RELEASE: EffectRow(takes=(_buckets(Thing.PARAMETERS),)),
        Op.REDUCE: EffectRow(
            takes=(_buckets(Thing.GRADIENT),),
            makes=(lambda i, scope: _after_reduce(i, scope, sharded=False),),
            adds=(lambda i, scope: _after_reduce(i, scope, sharded=True),),
        ),
        Op.REDUCE_ACROSS: EffectRow(takes=(_buckets(Thing.INSIDE),), makes=(_pieces(Thing.REDUCED),)),
        Op.REDUCE_PARTIAL: EffectRow(takes=(_of_trained(Thing.REDUCED),), makes=(_of_trained(Thing.SUMMED),)),
        Op.NORM: EffectRow(
            needs=(lambda i, scope: _of_trained(scope.final)(i, scope),), makes=(lambda i, scope: iter((NORM,)),)
        ),
        Op.UPDATE: EffectRow(needs=(_norm_of_update,), takes=(_final, _stale), makes=(_updated,)),
        Op.COPY_GRADIENT: EffectRow(takes=(_final,), makes=(_piece(Thing.HOST_GRADIENT),)),
        Op.READ_STATE: EffectRow(makes=(_on_disk(Thing.STATE),)),
        Op.UPDATE_HOST: EffectRow(
            needs=(_norm_of_update,),
            takes=(_piece(Thing.HOST_GRADIENT), _on_disk(Thing.STATE), _stale),
            makes=(_updated_there, _on_disk(Thing.NEW_STATE)),
        ),
        Op.COPY_PARAMETERS: EffectRow(takes=(_piece(Thing.NEW_PARAMETERS),), makes=(_renewed,)),
        Op.STORE: EffectRow(takes=(_piece(Thing.NEW_WEIGHTS),), makes=(_updated_there,)),
        Op.WRITE_PARAMETERS: EffectRow(takes=(_piece(Thing.NEW_PARAMETERS),), makes=(_renewed,)),
        Op.WRITE_STATE: EffectRow(takes=(_on_disk(Thing.NEW_STATE),)),
        Op.LEAVE: EffectRow(needs=(_graph,), makes=(_on_host,)),
        Op.FREE: EffectRow(needs=(_on_host,), takes=(_graph,)),
        Op.RETURN: EffectRow(takes=(_on_host,), makes=(_graph,)),
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
