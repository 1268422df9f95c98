"""Late updates in lists: where they stand, what the checker refuses, and what waits for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.pipeline.schedule import make_schedule
from megazero.plan.step_lists import StageLists
from megazero.program.checker import check_list
from megazero.program.example import ExampleModel
from megazero.program.instruction import Instruction, Op, ProgramError
from megazero.program.scope import FIRST, LATE, ON_TIME, SETTLING, Scope
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.program.simulate import simulate
from megazero.program.step import Lists, StepOptions, training_step
from megazero.program.times import uniform_times
from megazero.program.traffic import traffic
from tests.parity.training import small_model
from tests.program import kinds
from tests.program.faults import GATHER, REDUCE, Fault, again, drop, find, move, put, unit
from tests.program.made import texts
from tests.program.steps import Model, changed, checked, step_of

UPDATE, FORWARD, BACKWARD = "update (bucket {})", "forward", "backward"
ONE_RANK = Model(pp=1, micro_batches=2, border=LATE)
"""Embedding, two blocks and a head, a bucket each: 0 to 3."""


def words(instructions: tuple[Instruction, ...], shape: RankShape) -> str:
    """The begin of a list, up to the end of the first forward: f is the forward of a unit or of all, u an update, g a
    gather, x a release and r a receive.
    """
    letters = {Op.FORWARD: "f", kinds.UPDATE: "u", Op.GATHER: "g", kinds.RELEASE: "x", Op.RECV_FORWARD: "r"}
    found: list[str] = []
    for i in instructions:
        if i.op is Op.BACKWARD:
            last = max(number for number, word in enumerate(found) if word[0] == "f")
            return " ".join(found[: last + 1])
        if i.op in letters and i.micro_batch <= 0:
            found.append(letters[i.op] + "".join(map(str, i.buckets or (i.units or ())[:1])))
    raise AssertionError("no backward")


PLACES = [
    (replace(ONE_RANK, zero=0), 0, "u0123 f"),
    (replace(ONE_RANK, zero=0, merged=True), 0, "u012 f"),
    (replace(ONE_RANK, zero=1), 0, "u0 g0 u1 g1 f0 u2 g2 f1 u3 g3 f2 f3"),
    (replace(ONE_RANK, zero=2), 0, "u0 g0 u1 g1 f0 u2 g2 f1 u3 g3 f2 f3"),
    (replace(ONE_RANK, zero=1, overlap=False), 0, "u0 g0 u1 g1 u2 g2 u3 g3 f"),
    (replace(ONE_RANK, zero=1, dp=1), 0, "u0123 f"),
    (replace(ONE_RANK, zero=3, budget="one"), 0, "u0 g0 f0 x0 u1 g1 f1 x1 u2 g2 f2 x2 u3 g3 f3"),
    (replace(ONE_RANK, zero=3), 0, "u0 g0 u1 g1 f0 x0 u2 g2 f1 x1 u3 g3 f2 x2 f3"),
    (replace(ONE_RANK, zero=3, frozen=True), 0, "g3 u0 g0 g4 f0 x3 u1 g1 g5 f1 x0 x4 u2 g2 f2 x1 x5 f3"),
    # a later stage updates while it waits: all units of the chunk
    (Model(zero=1, border=LATE), 1, "r u0 g0 u1 g1 u2 g2 f0 f1 f2"),
    (Model(zero=3, border=LATE), 1, "u0 g0 u1 g1 r u2 f0 x0 g2 f1 x1 f2"),
    # a tied embedding whose shards two stages share: first on both
    (Model(zero=1, tied=True, border=LATE), 0, "u0 g0 u1 g1 f0 u2 g2 f1 f2"),
    (Model(zero=1, tied=True, border=LATE), 1, "u3 g3 r u0 g0 u1 g1 u2 g2 f0 f1 f2"),
    (Model(zero=3, tied=True, border=LATE), 1, "u0 g0 u1 g1 r u23 f0 x0 g2 g3 f1 x1 f2"),
]


@pytest.mark.parametrize(("model", "stage", "begins"), PLACES, ids=[begins for _, _, begins in PLACES])
def test_where_updates_stand(model: Model, stage: int, begins: str) -> None:
    step = step_of(model)
    found = words(step.lists[stage, 0], step.shapes[stage, 0])
    assert found == begins


def test_the_second_chunk_of_a_stage_is_updated_before_its_own_forward() -> None:
    """ZB-V, where the last stage hands its first chunk's hidden states to itself, and the first waits for them."""
    step = step_of(Model("zb-v", pp=2, virtual=2, micro_batches=4, zero=1, border=LATE))
    for stage, ahead in ((0, "receive hidden states (micro-batch 0, chunk 1"), (1, unit(FORWARD, 0, 1, 0))):
        own = list(step.lists[stage, 0])
        first = next(number for number, bucket in enumerate(step.shapes[stage, 0].buckets) if bucket.chunk == 1)
        update, used = find(own, UPDATE.format(first)), find(own, unit(FORWARD, 0, 0, 1))
        assert find(own, ahead) - 3 <= update < used
        assert find(own, unit(FORWARD, 0, 0, 0)) < update


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_three_lists_of_a_run(zero: int) -> None:
    """A step that follows another updates each bucket once, before the norm; a first one updates none; the updates
    alone are the rest of it. What is left of each is the same list.
    """
    step = {border: step_of(Model(zero=zero, border=border)) for border in (ON_TIME, FIRST, LATE, SETTLING)}
    for role, shape in step[LATE].shapes.items():
        late, first, alone = (step[border].lists[role] for border in (LATE, FIRST, SETTLING))
        updated = [bucket for i in late if i.op == kinds.UPDATE for bucket in i.buckets]
        assert sorted(updated) == list(shape.trained)
        assert max(n for n, i in enumerate(late) if i.op == kinds.UPDATE) < late.index(Instruction(Op.NORM))
        assert late[-1] == first[-1] == Instruction(Op.NORM)
        renewed = [i for i in late if i.op is Op.GATHER and shape.buckets[i.buckets[0]].gathered_after_update]
        assert [i for i in late if i.op != kinds.UPDATE and i not in renewed] == list(first)
        assert traffic(late, shape) == traffic(step[ON_TIME].lists[role], shape)
        on_time = step[ON_TIME].lists[role]
        assert on_time == (*first, *alone)


ZERO0, ZERO1, ZERO3 = (replace(ONE_RANK, zero=zero) for zero in (0, 1, 3))
PIPELINE, TIED = Model(zero=3, partial=True, border=LATE), Model(zero=1, tied=True, border=LATE)
OWED = "whose update from the last step is still owed"
FAULTS = {
    "an update is missing": Fault(ZERO1, drop(UPDATE.format(2)), GATHER.format(2), OWED),
    "an update and its gather are missing": Fault(
        ZERO1, lambda own: drop(GATHER.format(2))(drop(UPDATE.format(2))(own)), unit(FORWARD, 0, 2), OWED
    ),
    "all updates are missing": Fault(ZERO0, drop("update"), unit(FORWARD, 0), "parameters of bucket 0, whose"),
    "an update is missing where parameters are sharded": Fault(
        PIPELINE, drop(UPDATE.format(2)), GATHER.format(2), "the stored parameters of bucket 2, whose update"
    ),
    "an update comes after its use": Fault(
        ZERO0, move("update", unit(BACKWARD, 0)), unit(FORWARD, 0), "parameters of bucket 0, whose update"
    ),
    "an update comes after its gather": Fault(
        ZERO3, move(UPDATE.format(1), unit(FORWARD, 0, 1)), GATHER.format(1), "bucket 1, whose update"
    ),
    "an update comes after the backward": Fault(
        ZERO1, move(UPDATE.format(3), unit(BACKWARD, 0, 1)), GATHER.format(3), "bucket 3, whose update"
    ),
    "updated parameters are not gathered": Fault(
        ZERO1, drop(GATHER.format(1)), unit(FORWARD, 0, 1), "parameters of bucket 1, which no instruction"
    ),
    "an update comes twice": Fault(
        ZERO1, again(UPDATE.format(1)), UPDATE.format(1), "the last step's gradient of bucket 1, which number", 1
    ),
    "an update comes again behind the norm": Fault(
        ZERO3, lambda own: [*own, Instruction(kinds.UPDATE, buckets=(1,))], UPDATE.format(1), "has ended", 1
    ),
    "an update of frozen parameters": Fault(
        replace(PIPELINE, frozen=True),
        put(Instruction(kinds.UPDATE, buckets=(3,)), FORWARD),
        UPDATE.format(3),
        "the last step's gradient of bucket 3, which no instruction",
    ),
    "the norm comes twice": Fault(ZERO3, again("norm"), "norm", "makes the norm", 1),
    "a reduction is missing": Fault(ZERO1, drop(REDUCE.format(1)), "norm", "the reduced gradient of bucket 1"),
    "a first step has an update": Fault(
        replace(ZERO0, border=FIRST),
        put(Instruction(kinds.UPDATE, buckets=(0,)), FORWARD),
        UPDATE.format(0),
        "the last step's norm, which no instruction",
    ),
    "an update of updates alone comes twice": Fault(
        replace(ZERO1, border=SETTLING), again(UPDATE.format(2)), UPDATE.format(2), "gradient of bucket 2", 1
    ),
    "a gather of updates alone comes before its update": Fault(
        replace(ZERO1, border=SETTLING), move(GATHER.format(1), UPDATE.format(1)), GATHER.format(1), OWED
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused_and_its_instruction_named(fault: Fault) -> None:
    fault.assert_refused()


@pytest.mark.parametrize(
    ("model", "without", "says"),
    [
        (replace(ZERO1, border=SETTLING), "update (bucket 3)", "uses the last step's gradient of bucket 3"),
        (replace(ZERO3, border=SETTLING), "update", "uses the last step's gradient of bucket 0"),
        (replace(ZERO1, border=SETTLING), "gather parameters (bucket 3)", "makes the whole parameters"),
        (replace(ZERO1, border=LATE), "norm", "makes the norm"),
        (replace(ZERO1, border=FIRST), "norm", "makes the norm"),
    ],
    ids=["update", "all updates", "gather", "norm", "first norm"],
)
def test_what_is_missing_at_the_end_is_named(model: Model, without: str, says: str) -> None:
    step = step_of(model)
    left = [i for i in step.lists[0, 0] if not str(i).startswith(without)]
    if without.startswith("update (bucket"):  # its gather would be refused first
        left = [i for i in left if str(i) != "gather parameters (bucket 3)"]
    with pytest.raises(ProgramError, match=f"stage 0: nothing {says}"):
        checked(changed(step, 0, tuple(left)))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_list_fits_its_border_only(zero: int) -> None:
    """A list of one kind in the place of another: updates would be lost, or made of nothing."""
    steps = {border: step_of(replace(ONE_RANK, zero=zero, border=border)) for border in (ON_TIME, FIRST, LATE)}
    for border, step in steps.items():
        checked(step)
        for other in steps.keys() - {border}:
            with pytest.raises(ProgramError):
                checked(step, other)


def test_a_gradient_is_not_added_to_before_its_update() -> None:
    """Parameters that no forward reads, such as a table of which only the gradient is made here."""
    shape = RankShape(((UnitShape((), (), (0,)),),), (BucketShape(0, 8, 16),))
    compute = [Instruction(op, 0, 0, model_chunk=0) for op in (Op.FORWARD, Op.BACKWARD)]
    end = [Instruction(Op.REDUCE, buckets=(0,)), Instruction(Op.NORM)]
    update = Instruction(kinds.UPDATE, buckets=(0,))
    scope = Scope(shape, 1, border=LATE)
    for legal in ([update, *compute, *end], [compute[0], update, compute[1], *end]):
        check_list(legal, scope, 1)
    with pytest.raises(ProgramError, match=r"number 1 .*, adds to the gradient of bucket 0, of which the last step's"):
        check_list([*compute, update, *end], scope, 1)


def test_a_tied_embedding_that_is_updated_at_its_use_is_a_deadlock() -> None:
    """The last stage would come to the gather only after the first stage's forward, which waits for it."""
    step = checked(step_of(TIED))
    own = list(step.lists[1, 0])
    late = move(GATHER.format(3), unit(FORWARD, 0, 2))(move(UPDATE.format(3), unit(FORWARD, 0, 2))(own))
    assert texts(late) != texts(own) and sorted(texts(late)) == sorted(texts(own))
    with pytest.raises(ProgramError, match="deadlock"):
        checked(changed(step, 1, tuple(late)))


def test_a_later_stage_updates_while_it_waits() -> None:
    """Three stages of 4 units, each a bucket of 4 bytes of gradients: the update of a stage takes 4 x 0.5. The first
    stage's update and forward (2 + 1) end at 3; then the others go on at once.
    """
    model = ExampleModel((3, 4, 3), 0, 1)
    shapes = [model.shape([stage]) for stage in range(3)]
    schedule = make_schedule("1f1b", 3, 3)
    options = StepOptions(late=True)
    lists = [training_step(own, shape, options) for own, shape in zip(schedule, shapes, strict=True)]
    report = simulate(lists, replace(uniform_times(3), update=0.5 / 4), shapes, border=LATE)
    first = [next(span for span in row if span.instruction.op is Op.FORWARD) for row in report.spans]
    updates = [[span for span in row if span.instruction.op == kinds.UPDATE] for row in report.spans]
    assert [sum(span.end - span.start for span in row) for row in updates] == [2.0, 2.0, 2.0]
    assert [span.start for span in first] == [2.0, 3.0, 4.0]


def test_lists_of_a_rank_are_made_once_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ExampleModel((2,), 1, 2)
    schedule = make_schedule("1f1b", 1, 2)[0]
    lists = Lists(lambda m: schedule, lambda m: (), model.shape([0]), StepOptions(late=True), 1)
    assert lists.training(2, owed=True) is lists.training(2, owed=True) is not lists.training(2)
    assert lists.settling() is lists.settling()
    on_time = Lists(lambda m: schedule, lambda m: (), model.shape([0]), StepOptions(), 1)
    with pytest.raises(AssertionError, match="leaves no updates"):
        on_time.training(2, owed=True)
    monkeypatch.setattr("megazero.program.step.place_late_updates", lambda listed, shape, *_: listed)
    with pytest.raises(ProgramError, match="still owed"):
        Lists(lambda m: schedule, lambda m: (), model.shape([0]), StepOptions(late=True), 1).training(2, owed=True)


@pytest.mark.parametrize("broken", ["place_late_updates", "settling_list"])
def test_the_lists_of_all_stages_are_checked_in_all_three_kinds(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*small_model(4, heads=4), "--zero-stage", "1", "--pp", "2", "--global-batch-size", "8", "--late-update"]
    run = parse_run(flags, 4)
    lists = StageLists(run, axes_of(run, 4), nccl=False)
    lists.check()
    assert lists.of(0).border.owed and lists.of(0).border.leaves
    if broken == "settling_list":
        monkeypatch.setattr("megazero.plan.step_lists.settling_list", lambda *_: ())
    else:
        monkeypatch.setattr("megazero.program.step.place_late_updates", lambda listed, shape, *_: listed)
        lists = StageLists(run, axes_of(run, 4), nccl=False)
    with pytest.raises(ProgramError, match=r"owed|nothing uses"):
        lists.check()
