"""What every instruction reads and writes: one table, by which passes, checker and simulator go. The engine asks it
which parameters a computation reads; all other waits of a run are those of `zero.mover` and `disk.swap`.

A value is one thing that exists for part of a step: the hidden states that enter a unit, a unit's activations, the
whole parameters of a bucket, its gradient. A value has one writer at a time: an instruction that makes it ends an
absence, and one that takes it ends the value. So most of what can be wrong with a list is an instruction that reads
what is not there, or makes what is there already.

A gradient goes through `GRADIENT` (summed by backwards), `INSIDE` (reduced among the ranks that share the shards, where
others hold the same shard), `REDUCED`, and `SUMMED` (over tp, where it was partial). Each exists only where the next
step needs it. With late updates (`program.scope`) what a list leaves is `OWED` in the next one. A bucket whose update
is owed has no `SHARD` and no `PARAMETERS` that something could read.

A bucket may be updated in parts, some of them in host memory. From its last reduction to its next use each part has
values of its own: gradient, `SHARD`, and `PARAMETERS` unless ranks gather them.

Activations that leave the device are `HOST_ACTIVATIONS` too from their copy on, and these alone once they are freed on
the device. So no backward can come before they are copied back, and nothing can be freed that is not on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.tiers import FILE_TIERS, Tier
from megazero.program import state_values as state
from megazero.program.instruction import (
    RELEASE,
    UPDATE,
    UPDATE_HOST,
    WITH_MICRO_BATCH,
    Free,
    Instruction,
    Kind,
    Op,
    Piece,
    TierMove,
    Units,
    moves_of,
)
from megazero.program.scope import Scope
from megazero.program.shape import RankShape
from megazero.program.state_values import Which
from megazero.program.values import NORM, Effects, Thing, Value, of_bucket


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


def _written(i: Instruction, scope: Scope) -> Iterator[Value]:
    yield (Thing.DISK_ACTIVATIONS, i.micro_batch, i.chunk, *scope.units_of(i))


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

    Every micro-batch has the same computations. What one of them reads is found once. among: the buckets that are asked
    for; None: all.
    """

    def __init__(self, shape: RankShape, among: Container[int] | None = None) -> None:
        self._among = range(len(shape.buckets)) if among is None else among
        self._scope = Scope(shape, model_chunks=0)  # no parameter depends on the number of chunks
        self._found: dict[tuple[Kind, int, Units | None], tuple[int, ...]] = {}

    def __call__(self, i: Instruction) -> tuple[int, ...]:
        key = i.op, i.chunk, i.units
        if key not in self._found:
            values = [value for which in EFFECTS[i.op].needs for value in which(i, self._scope)]
            read = {value[1] for value in values if value[0] is Thing.PARAMETERS}
            self._found[key] = tuple(sorted(bucket for bucket in read if bucket in self._among))
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


_PASSING: Mapping[tuple[Piece, Tier], Which] = MappingProxyType(
    {
        (Piece.STATE, Tier.HOST): state.piece(Thing.STATE),
        (Piece.REDUCED, Tier.DEVICE): state.last_reduced,
        (Piece.REDUCED, Tier.HOST): state.piece(Thing.HOST_GRADIENT),
        (Piece.SUMS, Tier.DEVICE): state.last_reduced,
        (Piece.SUMS, Tier.HOST): state.piece(Thing.SUM),
        **{(Piece.SUMS, tier): state.piece(Thing.DISK_SUM) for tier in FILE_TIERS},
        (Piece.GRADIENTS, Tier.HOST): state.piece(Thing.HOST_GRADIENT),
        (Piece.GRADIENTS, Tier.DEVICE): state.piece(Thing.FETCHED),
        (Piece.PARAMETERS, Tier.HOST): state.piece(Thing.HOST_PARAMETERS),
        (Piece.PARAMETERS, Tier.DEVICE): state.piece(Thing.LOADED),
        (Piece.UPDATED, Tier.DEVICE): state.piece(Thing.NEW_WEIGHTS),
        (Piece.UPDATED, Tier.HOST): state.piece(Thing.NEW_PARAMETERS),
        (Piece.ACTIVATIONS, Tier.DEVICE): _graph,
        (Piece.ACTIVATIONS, Tier.HOST): _on_host,
        **{(Piece.ACTIVATIONS, tier): _written for tier in FILE_TIERS},
    }
)
"""What there is of a piece on a tier where it does not rest."""
_RESTING: Mapping[Piece, Which] = MappingProxyType(
    {
        Piece.STATE: lambda i, scope: iter(()),  # no value: it is always there
        Piece.GRADIENTS: state.final,
        Piece.PARAMETERS: state.stored,
        Piece.UPDATED: state.renewed,
    }
)
"""What there is of a piece on the tier where it rests. All others never rest."""


def _on(piece: Piece, tier: Tier) -> Which:
    """What there is of a piece on a tier: of a bucket whose piece rests there what rests, else what passes."""
    passing: Which = _PASSING.get((piece, tier), lambda i, scope: iter(()))
    resting = _RESTING.get(piece)
    if resting is None:
        return passing
    return lambda i, scope: (resting if state.home(piece, i, scope) is tier else passing)(i, scope)


_NOTHING: Iterator[Value] = iter(())
_STAYS: Mapping[Piece, Callable[[TierMove, Instruction, Scope], bool]] = MappingProxyType(
    {
        Piece.PARAMETERS: lambda move, i, scope: state.home(Piece.PARAMETERS, i, scope) is move.source,
        Piece.ACTIVATIONS: lambda move, i, scope: move.goes_out,
        Piece.GRADIENTS: lambda move, i, scope: (
            scope.is_early(i) and state.home(Piece.GRADIENTS, i, scope) is move.source
        ),
    }
)
"""By piece: whether what a copy reads stays. Parameters at rest stay when a use takes a copy of them, activations on
their way out until they are freed, and the gradient of an early update for the norm.
"""


def _copy(move: TierMove) -> EffectRow:
    """The effects of a copy: it takes what is on its source, unless that stays, and makes what is on its
    destination.
    """
    piece, source, destination = move
    read, made = _on(piece, source), _on(piece, destination)
    stays = _STAYS.get(piece)
    if stays is None:
        return EffectRow(takes=(read,), makes=(made,))
    return EffectRow(
        needs=(lambda i, scope: read(i, scope) if stays(move, i, scope) else _NOTHING,),
        takes=(lambda i, scope: _NOTHING if stays(move, i, scope) else read(i, scope),),
        makes=(made,),
    )


def _gradient_of_update(i: Instruction, scope: Scope, *, stays: bool) -> Iterator[Value]:
    """The gradient in host memory that an update reads, if it is there behind the update, or if it is not. An early
    update leaves the sum that rests there to the norm.
    """
    at_rest = state.home(Piece.GRADIENTS, i, scope) is Tier.HOST
    if stays is (at_rest and scope.is_early(i)):
        yield from _on(Piece.GRADIENTS, Tier.HOST)(i, scope)


EFFECTS: Mapping[Kind, EffectRow] = MappingProxyType(
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
        Op.GATHER: EffectRow(
            needs=(state.on_device,), takes=(state.loaded,), makes=(state.of_buckets(Thing.PARAMETERS),)
        ),
        RELEASE: EffectRow(takes=(state.of_buckets(Thing.PARAMETERS),)),
        Op.REDUCE: EffectRow(
            takes=(state.of_buckets(Thing.GRADIENT),),
            makes=(lambda i, scope: state.after_reduce(i, scope, sharded=False),),
            adds=(lambda i, scope: state.after_reduce(i, scope, sharded=True),),
        ),
        Op.REDUCE_ACROSS: EffectRow(takes=(state.of_buckets(Thing.INSIDE),), makes=(state.pieces(Thing.REDUCED),)),
        Op.REDUCE_PARTIAL: EffectRow(
            takes=(state.summed_over_tp(Thing.REDUCED),), makes=(state.summed_over_tp(Thing.SUMMED),)
        ),
        Op.NORM: EffectRow(needs=(state.of_norm,), takes=(state.counted,), makes=(lambda i, scope: iter((NORM,)),)),
        Op.ADD_GRADIENT: EffectRow(
            needs=(state.piece(Thing.SUM),), takes=(state.piece(Thing.HOST_GRADIENT),), adds=(state.piece(Thing.SUM),)
        ),
        Op.COUNT_GRADIENT: EffectRow(needs=(state.summed,), makes=(state.piece(Thing.SQUARES),)),
        UPDATE: EffectRow(needs=(state.norm_of_update,), takes=(state.for_update, state.stale), makes=(state.updated,)),
        UPDATE_HOST: EffectRow(
            needs=(state.norm_of_update, lambda i, scope: _gradient_of_update(i, scope, stays=True)),
            takes=(
                lambda i, scope: _gradient_of_update(i, scope, stays=False),
                _on(Piece.STATE, Tier.HOST),
                state.stale,
            ),
            makes=(
                _on(Piece.UPDATED, Tier.HOST),
                _on(Piece.STATE, Tier.HOST),
            ),
        ),
        Free(Piece.ACTIVATIONS, Tier.DEVICE): EffectRow(needs=(_on_host,), takes=(_graph,)),
        Free(Piece.ACTIVATIONS, Tier.HOST): EffectRow(needs=(_written,), takes=(_on_host,)),
        **{move: _copy(move) for move in moves_of(*Piece)},
    }
)
"""By kind of instruction."""


def effects(i: Instruction, scope: Scope) -> Effects:
    """What an instruction of this rank reads and writes."""
    if i.op in WITH_MICRO_BATCH:
        return _of_micro_batch(i, scope)
    if i.micro_batch >= 0 or not i.buckets:
        return _of_row(i, scope)
    # what moves model state comes with each micro-batch, which it does not ask for
    moved = i.op, i.buckets, i.part
    if moved not in scope.moved:
        scope.moved[moved] = _of_row(i, scope)
    return scope.moved[moved]


def _of_micro_batch(i: Instruction, scope: Scope) -> Effects:
    """The effects of a computation or transfer, by those of the first one with the same units. The micro-batch changes
    what it takes and makes, all of which is of the micro-batch, and not the buckets that it reads and adds to.
    """
    key = i.op, i.chunk, i.model_chunk, i.units
    if key not in scope.computed:
        scope.computed[key] = _of_row(i, scope)
    needs, takes, makes, adds = scope.computed[key]
    number = i.micro_batch
    return Effects(
        needs,
        [(thing, number, chunk, unit, stop) for thing, _, chunk, unit, stop in takes],
        [(thing, number, chunk, unit, stop) for thing, _, chunk, unit, stop in makes],
        adds,
    )


def _of_row(i: Instruction, scope: Scope) -> Effects:
    row = EFFECTS[i.op]
    return Effects(*(_values(column, i, scope) for column in (row.needs, row.takes, row.makes, row.adds)))


def _values(column: tuple[Which, ...], i: Instruction, scope: Scope) -> Sequence[Value]:
    return [value for which in column for value in which(i, scope)] if column else ()
