"""The machine of moves: it lets every legal list pass, and refuses planted faults by the piece and its place.

The account of values in the checker refuses most of these lists too. Here the machine runs alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megazero.config.tiers import FILE_TIERS, Tier
from megazero.program.effects import effects
from megazero.program.instruction import Instruction, Piece, ProgramError, TierMove
from megazero.program.moves import LEGAL, Doing, IllegalMove, Moves, Standing
from megazero.program.scope import LATE, Scope
from tests.program import kinds
from tests.program.faults import again, drop, find, move
from tests.program.steps import Model, changed, checked, drawn, step_of

DISK = Model(pp=1, micro_batches=2, zero=0, parts=(Tier.DEVICE, Tier.DISK))
HOST = replace(DISK, parts=(Tier.HOST,))
LATE_HOST = replace(HOST, border=LATE)
LEAVING = Model(pp=1, micro_batches=1, zero=0, units=(4,), leaving=1.0)
MANY = Model(pp=1, micro_batches=1, zero=0, units=(6,), parts=(Tier.DISK,))
PART = "(bucket 1, part {})"
UNIT = "(micro-batch 0, chunk 0, unit 1)"
Change = Callable[[list[Instruction]], list[Instruction]]


def refusal(model: Model, change: Change) -> tuple[str, str] | None:
    """What the machine alone says of a changed list: the instruction and the sentence; None: it lets the list pass."""
    step = step_of(model)
    shape = step.shapes[0, 0]
    scope = Scope(shape, model.pp * model.virtual, border=model.border)
    moves = Moves(scope)
    for i in change(list(step.lists[0, 0])):
        try:
            moves.take(i, effects(i, scope))
        except IllegalMove as error:
            return str(i), str(error)
    try:
        moves.finish()
    except IllegalMove as error:
        return "", str(error)
    return None


def late_slots(own: list[Instruction]) -> list[Instruction]:
    """All reads come before the first update."""
    reads = [i for i in own if i.op == kinds.READ_STATE]
    rest = [i for i in own if i.op != kinds.READ_STATE]
    at = find(rest, "copy gradients to host memory (bucket 0")
    return [*rest[:at], *reads, *rest[at:]]


def slots(change: Callable[[int, Instruction], Instruction]) -> Change:
    """The list with other slots. change: from the bucket of an instruction with a slot, and it, to another one."""
    return lambda own: [change(i.buckets[0], i) if i.slot >= 0 else i for i in own]


FAULTS = {
    "state is read twice": (
        DISK,
        again(f"read optimizer states {PART.format(1)}"),
        f"read optimizer states {PART.format(1)}",
        "optimizer states of part 1 of bucket 1 are on their way to host memory since read optimizer states",
    ),
    "state is updated before it is read": (
        DISK,
        move(f"update in host memory {PART.format(1)}", f"read optimizer states {PART.format(1)}"),
        f"update in host memory {PART.format(1)}",
        "optimizer states of part 1 of bucket 1 rest on disks",
    ),
    "state is updated while it is written": (
        DISK,
        move(f"write optimizer states {PART.format(1)}", f"update in host memory {PART.format(1)}"),
        f"write optimizer states {PART.format(1)}",
        "of bucket 1 are on their way to host memory since read optimizer states",
    ),
    "state is updated again, after it has been written": (
        DISK,
        lambda own: [*own, Instruction(kinds.UPDATE_HOST, buckets=(1,), part=1)],
        f"update in host memory {PART.format(1)}",
        "optimizer states of part 1 of bucket 1 are on their way to disks since write optimizer states",
    ),
    "state on the device is updated in host memory": (
        DISK,
        lambda own: [*own, Instruction(kinds.UPDATE_HOST, buckets=(1,), part=0)],
        f"update in host memory {PART.format(0)}",
        "optimizer states of part 0 of bucket 1 rest on the device: legal where they are on their way",
    ),
    "state in host memory is read from disks": (
        HOST,
        lambda own: [Instruction(kinds.READ_STATE, buckets=(1,), part=0), *own],
        f"read optimizer states {PART.format(0)}",
        "optimizer states of part 0 of bucket 1 rest in host memory: legal where they rest on disks",
    ),
    "a gradient moves twice": (
        HOST,
        again(f"copy gradients to host memory {PART.format(0)}"),
        f"copy gradients to host memory {PART.format(0)}",
        "gradients of part 0 of bucket 1 are on their way to host memory",
    ),
    "an update before its gradient has left": (
        HOST,
        move(f"update in host memory {PART.format(0)}", f"copy gradients to host memory {PART.format(0)}"),
        f"update in host memory {PART.format(0)}",
        "gradients of part 0 of bucket 1 rest on the device",
    ),
    "a backward adds to a gradient that is leaving": (
        HOST,
        move(f"copy gradients to host memory {PART.format(0)}", "backward (micro-batch 1"),
        "backward (micro-batch 1, chunk 0, unit 1)",
        "gradients of part 0 of bucket 1 are on their way to host memory",
    ),
    "parameters are copied before their update": (
        HOST,
        move(f"copy updated parameters to the device {PART.format(0)}", f"update in host memory {PART.format(0)}"),
        f"copy updated parameters to the device {PART.format(0)}",
        "parameters of part 0 of bucket 1 rest on the device",
    ),
    "a forward while parameters are in use elsewhere": (
        LATE_HOST,
        move(f"copy updated parameters to the device {PART.format(0)}", "backward (micro-batch 0"),
        "forward (micro-batch 0, chunk 0, unit 1)",
        "parameters of part 0 of bucket 1 are in use in host memory since update in host memory",
    ),
    "parameters do not come back": (
        HOST,
        drop(f"copy updated parameters to the device {PART.format(0)}"),
        "",
        "leaves parameters of part 0 of bucket 1 where they are in use in host memory",
    ),
    "activations leave twice": (
        LEAVING,
        again(f"copy activations to host memory {UNIT}"),
        f"copy activations to host memory {UNIT}",
        "are on their way to host memory",
    ),
    "a backward works with activations that are leaving": (
        LEAVING,
        lambda own: [i for i in own if i.op not in (kinds.FREE, kinds.RETURN)],
        "backward (micro-batch 0, chunk 0, unit 3)",
        "the activations of units 3 to 3 of chunk 0 as one graph (micro-batch 0) are on their way to host memory",
    ),
    "activations are freed before they have left": (
        LEAVING,
        move(f"free activations {UNIT}", f"copy activations to host memory {UNIT}"),
        f"free activations {UNIT}",
        "rest on the device",
    ),
    "activations come back before they are free": (
        LEAVING,
        drop(f"free activations {UNIT}"),
        f"copy activations to the device {UNIT}",
        "are on their way to host memory",
    ),
    "a slot that another part has": (
        MANY,
        late_slots,
        "read optimizer states (bucket 6, part 0)",
        "takes slot 0 of 6, which part 0 of bucket 0 has not left",
    ),
    "two parts in one slot": (
        replace(MANY, ahead=True),
        slots(lambda bucket, i: i._replace(slot=0) if bucket == 2 else i),
        "read optimizer states (bucket 2, part 0)",
        "takes slot 0 of 6, which part 0 of bucket 0 has not left",
    ),
    "a part in two slots": (
        MANY,
        slots(lambda bucket, i: i._replace(slot=5) if i.op == kinds.WRITE_STATE and bucket == 7 else i),
        "write optimizer states (bucket 7, part 0)",
        "takes slot 5, and its part has another one",
    ),
    "a part without a slot": (
        DISK,
        slots(lambda bucket, i: i._replace(slot=-1) if i.op == kinds.READ_STATE else i),
        "read optimizer states (bucket 0, part 1)",
        "names slot -1 of 6, and needs one",
    ),
    "a slot beyond the last one": (
        MANY,
        slots(lambda bucket, i: i._replace(slot=i.slot + 1)),
        "read optimizer states (bucket 5, part 0)",
        "names slot 6 of 6, and needs one",
    ),
    "a slot that is free before its part has left": (
        MANY,
        slots(lambda bucket, i: i._replace(frees_slot=i.op == kinds.UPDATE_HOST)),
        "update in host memory (bucket 0, part 0)",
        "frees slot 0; its part is there until write optimizer states",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_illegal_move_is_refused_and_named(fault: tuple[Model, Change, str, str]) -> None:
    """By the machine alone, and by the checker."""
    model, change, named, says = fault
    assert refusal(model, lambda own: own) is None
    found = refusal(model, change)
    assert found is not None and found[0] == named, found
    assert says in found[1]
    step = checked(step_of(model))
    with pytest.raises(ProgramError):
        checked(changed(step, 0, tuple(change(list(step.lists[0, 0])))))


def test_the_checker_names_the_instruction_that_takes_a_used_slot() -> None:
    """The account of values knows nothing of slots: this list would overwrite a gradient that is still to be used."""
    step = step_of(MANY)
    planted = tuple(late_slots(list(step.lists[0, 0])))
    with pytest.raises(ProgramError, match="takes slot 0 of 6, which part 0 of bucket 0 has not left") as refused:
        checked(changed(step, 0, planted))
    assert refused.value.number == find(list(planted), "read optimizer states (bucket 6")


@pytest.mark.parametrize("seed", range(40))
def test_legal_lists_pass(seed: int) -> None:
    model = replace(drawn(random.Random(seed)), evaluation=False)
    step = step_of(model)
    for role, own in step.lists.items():
        scope = Scope(step.shapes[role], model.pp * model.virtual, border=step.border)
        moves = Moves(scope)
        for i in own:
            moves.take(i, effects(i, scope))
        moves.finish()


def test_every_move_of_the_table_is_one_step_between_tiers() -> None:
    """Nothing goes to a tier but by being on its way there or in use beside it, and nothing is computed on disks."""
    at_rest = [Standing(Doing.RESTS, tier) for tier in FILE_TIERS]
    for (op, piece), legal in LEGAL.items():
        steps = [(before, at) for before, after in legal.items() for at in (at_rest if after is None else [after])]
        for before, after in steps:
            assert not {Standing(Doing.COMPUTES, tier) for tier in FILE_TIERS} & {before, after}
            if before.tier is not after.tier and piece is not Piece.GRADIENTS:
                # New ones are made where the weights are, and a new sum where it is stored.
                updates = op in (kinds.UPDATE, kinds.UPDATE_HOST, kinds.STORE_GRADIENT)
                assert Doing.MOVES in (before.doing, after.doing) or updates, (op, piece, before, after)
            twice = before.doing is Doing.MOVES and after.doing is Doing.MOVES
            # What is copied to a slot goes on from there, and a read waits for the write of its piece.
            through_a_slot = isinstance(op, TierMove) and (op.source.in_files or op.destination.in_files)
            assert not twice or through_a_slot, (op, piece)
