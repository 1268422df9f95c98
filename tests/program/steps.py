"""Steps of made-up models: shapes and lists of all stages, drawn at random or by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megazero.config.tiers import Tier
from megazero.pipeline.schedule import CHUNKS, chunk_map, forward_only, make_schedule
from megazero.program.checker import Role, check
from megazero.program.instruction import Instruction
from megazero.program.passes.gathers import one_unit, two_units
from megazero.program.passes.leaving import ActivationFiles
from megazero.program.passes.vertical import Groups, VerticalOrder
from megazero.program.scope import AGAIN, EARLY, FIRST, LATE, ON_TIME, SETTLING, Border
from megazero.program.shape import BucketShape, PartShape, RankShape, UnitShape
from megazero.program.simulate import schedule_shape
from megazero.program.step import StepOptions, evaluation_step, settling_list, training_step

Instructions = tuple[Instruction, ...]
EMBEDDING, BLOCK, HEAD = 70, 90, 50
"""Elements of the units' buckets."""


@dataclass(frozen=True)
class Model:
    """A model and its layout. units: blocks of every model chunk, in turn. frozen: embedding and blocks have a frozen
    bucket as well; the embedding nothing else. parts: where the optimizer state of the parts of each trained bucket
    rests; none: no bucket has parts. rests: where the parameters of every bucket rest; those on disks have one part
    where `parts` says nothing. staying: buckets of a stage, the first ones, whose parameters stay on the device all the
    same. sums: where the gradients of every trained bucket are summed. border: of the lists, where they are no
    evaluation's. vertical: the order of micro-batches, horizontal where it is None. leaving: share of the activations
    that leaves; then the units of a chunk keep 10, 20, 30 bytes and so on. disk_buffers: bytes of host memory through
    which these go to files, those of the tier `written_to`; None: none do. ahead: whether the first optimizer state is
    read before the norm; then the border of late lists is to say so.
    """

    schedule: str = "1f1b"
    pp: int = 2
    virtual: int = 1
    micro_batches: int = 3
    units: tuple[int, ...] = (2,)
    zero: int = 1
    dp: int = 4
    across: int = 1
    tied: bool = False
    frozen: bool = False
    partial: bool = False
    merged: bool = False
    overlap: bool = True
    budget: str = "two"
    evaluation: bool = False
    parts: tuple[Tier, ...] = ()
    rests: Tier = Tier.DEVICE
    staying: int = 0
    sums: Tier = Tier.DEVICE
    border: Border = ON_TIME
    vertical: VerticalOrder | None = None
    leaving: float = 0.0
    disk_buffers: int | None = None
    written_to: Tier = Tier.DISK
    ahead: bool = False

    @property
    def shares_parameters(self) -> bool:
        return self.zero == 3 or (self.zero > 0 and self.rests is not Tier.DEVICE)

    @property
    def gathers(self) -> bool:
        """Whether parameters are there for each use only."""
        return self.shares_parameters or self.rests is not Tier.DEVICE

    @property
    def groups(self) -> Groups | None:
        return None if self.vertical is None else self.vertical.groups(self.micro_batches)


@dataclass(frozen=True)
class Step:
    """The lists of a step, as `checker.check` takes them."""

    lists: dict[Role, tuple[Instruction, ...]]
    shapes: dict[Role, RankShape]
    micro_batches: int
    budgets: dict[Role, int]
    border: Border = field(default=ON_TIME)


def shape_of(model: Model, stage: int) -> RankShape:
    """The units and buckets of a stage. merged: all blocks of a chunk are in one bucket, unless they are gathered."""
    chunks = chunk_map(model.schedule, model.pp, model.virtual)
    trained: list[BucketShape] = []
    frozen: list[BucketShape] = []
    wanted: list[list[tuple[str, list[int], list[int]]]] = []
    ties = {0: -1}  # the bucket of a tied embedding, once it is there

    def bucket(chunk: int, numel: int, *, spans: bool = False, is_trained: bool = True) -> int:
        together = spans and model.across == 1 and not model.shares_parameters
        shards = model.dp // model.across * (2 if together else 1)
        across = model.across * (2 if spans and not together else 1)
        leaves = is_trained and model.sums is not Tier.DEVICE
        rests = Tier.DEVICE if len(trained) + len(frozen) < model.staying else model.rests
        tiers = model.parts * is_trained or (Tier.DEVICE,) * (rests.in_files or leaves)
        made = BucketShape(
            chunk,
            2 * numel,
            4 * numel * is_trained,
            trained=is_trained,
            gathered=model.shares_parameters or rests is not Tier.DEVICE,
            sharded_gradient=is_trained and (model.zero >= 2 or (model.zero == 1 and leaves)),
            sharded_state=is_trained and model.zero >= 1,
            shards=shards,
            across=across,
            spans_stages=spans,
            shards_span=together,
            parts=tuple(PartShape(tier, numel, 3 * numel, numel // 2) for tier in tiers),
            rests=rests,
            rests_whole=rests is not Tier.DEVICE and not (model.shares_parameters and shards > 1),
            sums=model.sums if is_trained else Tier.DEVICE,
            partial=is_trained and model.partial,
        )
        (trained if is_trained else frozen).append(made)
        return len(trained if is_trained else frozen) - 1

    together = chunks.last_stage == 0
    for chunk, number in enumerate(chunks.of(stage)):
        units: list[tuple[str, list[int], list[int]]] = []
        if number == 0:
            adapted = [bucket(chunk, EMBEDDING, is_trained=False)] if model.frozen else []
            own = [] if model.frozen else [bucket(chunk, EMBEDDING, spans=model.tied and not together)]
            ties[0] = own[0] if own else -1
            units.append(("embedding", own, adapted))
        shared = bucket(chunk, BLOCK) if model.merged and not model.gathers else None
        for _ in range(model.units[number % len(model.units)]):
            adapted = [bucket(chunk, BLOCK, is_trained=False)] if model.frozen else []
            units.append(("block", [bucket(chunk, BLOCK) if shared is None else shared], adapted))
        if number == chunks.count - 1:
            own = [bucket(chunk, HEAD)]
            if model.tied and not model.frozen:
                own.append(ties[0] if together else bucket(chunk, EMBEDDING, spans=True))
            units.append(("head", own, []))
        wanted.append(units)
    shapes = []
    for units in wanted:
        row = []
        for _, own, adapted in units:
            read = (*own, *(len(trained) + number for number in adapted))
            row.append(UnitShape(read, read, tuple(own)))
        shapes.append(tuple(row))
    return RankShape(tuple(shapes), (*trained, *frozen), model.partial and model.sums is Tier.DEVICE)


def settling_of(model: Model) -> Step:
    """The lists of updates alone."""
    shapes = {(stage, 0): shape_of(model, stage) for stage in range(model.pp)}
    options = StepOptions(late=not model.border.early, ahead=model.ahead, early=model.border.early)
    return Step({role: settling_list(shape, options) for role, shape in shapes.items()}, shapes, 0, {}, model.border)


def step_of(model: Model) -> Step:
    """The lists that the passes make."""
    if model.border.owed and not model.border.leaves:
        return settling_of(model)
    groups = model.groups
    number = model.micro_batches if groups is None else len(groups)
    schedule = make_schedule(model.schedule, model.pp, number, model.virtual)
    lists: dict[Role, tuple[Instruction, ...]] = {}
    shapes: dict[Role, RankShape] = {}
    budgets: dict[Role, int] = {}
    for stage, instructions in enumerate(schedule):
        role = stage, 0
        shape = shape_of(model, stage)
        if model.leaving:
            shape = shape.keeping([range(10, 10 * len(units) + 1, 10) for units in shape.units])
        shapes[role] = shape
        if model.evaluation:
            instructions = forward_only(instructions)
        options = StepOptions(
            model.zero >= 2 or model.sums is not Tier.DEVICE,
            model.overlap,
            gathered_bytes=10**9,
            late=model.border.is_late,
            vertical=model.vertical,
            leaving=model.leaving,
            files=None if model.disk_buffers is None else ActivationFiles(model.written_to, model.disk_buffers),
            ahead=model.ahead,
            early=model.border.early,
        )

        def listed(instructions: Sequence[Instruction], shape: RankShape, options: StepOptions) -> Instructions:
            if model.evaluation:
                return evaluation_step(instructions, shape, options, groups=groups)
            border = model.border
            return training_step(instructions, shape, options, groups=groups, owed=border.owed, early=border.early)

        lists[role] = listed(instructions, shape, options)
        if model.gathers:
            cut = [i for i in lists[role] if not i.buckets]
            budgets[role] = {"one": one_unit(cut, shape), "two": two_units(cut, shape), "all": 10**9}[model.budget]
            lists[role] = listed(instructions, shape, replace(options, gathered_bytes=budgets[role]))
    border = ON_TIME if model.evaluation else model.border
    return Step(lists, shapes, model.micro_batches, budgets, border)


def drawn(source: random.Random) -> Model:
    """Any layout."""
    name = source.choice(list(CHUNKS))
    pp = source.randint(1, 5)
    virtual = CHUNKS[name] or source.randint(1, 3)
    zero = source.randint(0, 3)
    dp = source.choice((1, 2, 4))
    border = source.choice((ON_TIME, ON_TIME, FIRST, LATE, LATE, SETTLING))
    ahead = source.random() < 0.5
    model = Model(
        name,
        pp,
        virtual,
        source.randint(1, 8),
        tuple(source.choices((1, 2, 3), k=source.randint(1, 3))),
        zero,
        dp,
        source.choice([across for across in (1, 2, 4) if across <= dp]),
        tied=source.random() < 0.5,
        frozen=source.random() < 0.3,
        partial=source.random() < 0.5,
        merged=source.random() < 0.5,
        overlap=source.random() < 0.7,
        budget=source.choice(("one", "two", "all")),
        evaluation=source.random() < 0.2,
        parts=tuple(source.choices(tuple(Tier), k=source.choice((0, 0, 1, 2, 3)))),
        rests=source.choice((Tier.DEVICE, *Tier)),
        staying=source.choice((0, 0, 1, 3)),
        sums=source.choice((Tier.DEVICE, *Tier)),
        border=replace(border, ahead=ahead and border.is_late),
        vertical=source.choice((None, None, VerticalOrder(), VerticalOrder(2), VerticalOrder(3))),
        leaving=source.choice((0.0, 0.0, 0.3, 1.0)),
        disk_buffers=source.choice((None, 50_000, 90_000)),
        ahead=ahead,
    )
    early = {ON_TIME: EARLY, SETTLING: AGAIN}.get(border, border)  # drawn last, so that all else is as without it
    return replace(model, border=early) if source.random() < 0.5 and early.early else model


def changed(step: Step, stage: int, instructions: tuple[Instruction, ...]) -> Step:
    """The step with another list for a stage."""
    return replace(step, lists=step.lists | {(stage, 0): instructions})


def checked(step: Step, border: Border | None = None) -> Step:
    """The step. Raises ProgramError for its first fault. border: another one than its own."""
    check(step.lists, step.shapes, step.micro_batches, step.budgets, step.border if border is None else border)
    return step


def check_schedule(lists: Sequence[Sequence[Instruction]], micro_batches: int) -> None:
    """Raise ProgramError for the first fault of a schedule: lists of all stages without instructions on state."""
    roles = {(stage, 0): instructions for stage, instructions in enumerate(lists)}
    check(roles, {role: schedule_shape(instructions) for role, instructions in roles.items()}, micro_batches)
