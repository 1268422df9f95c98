"""Which blocks are recomputed, and how, to fit a budget of bytes (--activation-memory-budget) at the least extra work.

Every stage fits for itself. Of equal blocks of a chunk only the numbers of blocks count that keep all, drop their
attention core, and drop everything. Their order follows: what is alive while a block's backward runs is
what the blocks before it keep, so those with the largest peak above what they keep come first. These are the blocks
that are recomputed as a whole, then those without their core, then the others. Blocks of another kind that stand
between them change nothing in that.

Equal blocks of a chunk are a group of choices, and each unit at each moment of the stage's list is a limit: what the
stage holds there is a sum over its blocks. `plan.knapsack` searches. It is exact, but for stages with several groups of
many blocks, where it says how far from the least work its choice is at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from fused_ops.attention.selection import Body, choose
from fused_ops.attention.trial import AttentionWorkload, static_support
from megazero.config.derive import (
    FULL,
    NONE,
    RECOMPUTE,
    SELECTIVE,
    RecomputeTable,
    micro_batch_order,
    recompute_by_flags,
)
from megazero.config.layers.kinds import kind_numbers, kinds
from megazero.config.placement import unplaced
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.pipeline.build import attention_support, attention_workload, schedules, step_options
from megazero.pipeline.measured import read_by_a_unit
from megazero.pipeline.stage_specs import chunks_of, specs_by_stage, specs_of_stage
from megazero.plan.activations import (
    ActivationPlan,
    ChunkBytes,
    ChunkGroup,
    Moment,
    binding,
    chunk_bytes,
    moments,
    peak_bytes,
    places,
)
from megazero.plan.flops import again_flops
from megazero.plan.knapsack import OptionGroup, Selection, select
from megazero.plan.rank_state import micro_batches_of
from megazero.program.instruction import Instruction, Op
from megazero.system import device as devices
from megazero.system.words import counted

ASSUMED = "a card of compute capability 9.0"
"""What a plan for cards assumes on a machine without one."""


@dataclass(frozen=True)
class RecomputeChoice:
    """What backward computes again of every block. missed: the share of its operations that another could save."""

    table: RecomputeTable
    missed: float = 0.0


def recompute_table(run: Run, axes: Axes, kind: str) -> RecomputeTable:
    """The table of `recompute_choice`."""
    return recompute_choice(run, axes, kind).table


@cache
def recompute_choice(run: Run, axes: Axes, kind: str) -> RecomputeChoice:
    """What backward computes again of every block: what the flags say, or what fits the budget on every stage.

    kind: of device, cpu or cuda. It decides the body of attention, and so what attention keeps. Raises ConfigError
    where a stage does not fit even if all of its blocks are recomputed.
    """
    budget = run.parallel.activation_memory_budget
    if budget is None:
        return RecomputeChoice(recompute_by_flags(run))
    table, problems = [NONE] * run.model.num_layers, list[str]()
    work = bound = 0
    known: dict[object, tuple[RecomputeTable, Selection] | None] = {}
    for number in range(axes.pp):
        stage = StageActivations(run, axes, number, kind)
        when = tuple(binding(moments(stage.instructions, len(stage.specs))))
        first = stage.plan.first_equal
        shapes = ((*map(first.__getitem__, spec.blocks), spec.has_embedding, spec.has_head) for spec in stage.specs)
        like = when, *stage.groups, *shapes  # stages in the middle of a pipeline are alike
        if like not in known:
            known[like] = stage.least_work(when, budget)
        choice = known[like]
        if choice is None:
            least = min(stage.peak((kind,) * run.model.num_layers) for kind in (NONE, SELECTIVE, FULL))
            smaller = "" if micro_batch_order(run) == "horizontal" else "a smaller --vertical-group-size, "
            blocks_here = counted(sum(len(spec.blocks) for spec in stage.specs), "recomputed block")
            problems.append(
                f"--activation-memory-budget {budget:,}: stage {number} needs {least:,} bytes for its activations with "
                f"{blocks_here}; nearest: that budget, {smaller}a smaller --micro-batch-size than "
                f"{run.schedule.micro_batch_size}, or --sequence-parallel with --tp"
            )
            continue
        kinds, selection = choice
        work, bound = work + selection.cost, bound + selection.bound
        blocks = chain.from_iterable(spec.blocks for spec in stage.specs)
        for block, again in zip(blocks, kinds, strict=True):
            table[block] = again
    if problems:
        raise ConfigError(problems)
    return RecomputeChoice(tuple(table), 1 - bound / work if work else 0.0)


def activation_plan(run: Run, kind: str) -> ActivationPlan:
    """The sizes of a run's activations with the bodies of attention that this machine has for it; for cuda on a machine
    without a card, with those that `ASSUMED` has.
    """
    bodies = [_body_of(attention_workload(run, layer), run, kind) for layer in kinds(run.model)]
    read = read_by_a_unit(unplaced(run) if run.optimizer.fp8 != "off" else run)
    return _plan(read, tuple(bodies[place] for place in kind_numbers(run.model)), kind)


def _body_of(workload: AttentionWorkload, run: Run, kind: str) -> Body:
    if kind == "cuda" and not devices.cuda_available():
        return _assumed_body(workload, run.parallel.attention)
    device = torch.device(kind)
    return choose(workload.case(device), attention_support(run, device)).body


@lru_cache(maxsize=256)
def _assumed_body(workload: AttentionWorkload, attention: str) -> Body:
    """The body that `ASSUMED` has."""
    case = replace(workload.case(torch.device("cpu")), kind="cuda", kernel=False, capability=(9, 0))
    return choose(case, static_support(attention, workload.length)).body


@lru_cache(maxsize=256)
def _plan(run: Run, bodies: tuple[Body, ...], kind: str) -> ActivationPlan:
    """One for all runs whose units read the same: it computes the bytes of each unit once."""
    return ActivationPlan(run, bodies, kind)


def instructions_of(run: Run, axes: Axes, stage: int) -> Sequence[Instruction]:
    """A stage's computations and transfers in a step of the run's largest batch; in vertical order those of groups."""
    return schedules(run, stage)(max(1, micro_batches_of(run, axes)))


def chunk_groups(run: Run, axes: Axes, stage: int) -> list[ChunkGroup | None]:
    """How each chunk of a stage is computed in vertical order; None in horizontal order."""
    numbers, groups = chunks_of(run).of(stage), step_options(run).groups(max(1, micro_batches_of(run, axes)))
    if groups is None:
        return [None] * len(numbers)
    last = chunks_of(run).count - 1
    computed = [i for i in instructions_of(run, axes, stage) if i.is_compute]
    at_once = any(
        first.op is Op.FORWARD and second.is_backward and first.micro_batch == second.micro_batch
        for first, second in pairwise(computed)
        if first.model_chunk == second.model_chunk == last
    )
    return [
        ChunkGroup(len(groups[0]), turns_back=number == last and at_once, stays=number + 1 in numbers)
        for number in numbers
    ]


class StageActivations:
    """What the activations of a rank of a stage depend on, but for what backward computes again.

    specs, groups  of each chunk: what it is, and how it is computed (`chunk_groups`)
    waiting        bytes beside a computation: one message that has come from another stage, or that has not left yet;
                   or those of a group, where a chunk hands them to the next one on this rank
    """

    def __init__(self, run: Run, axes: Axes, stage: int, kind: str) -> None:
        self.plan, self.specs = activation_plan(run, kind), specs_of_stage(run, stage)
        self.instructions, self.groups = instructions_of(run, axes, stage), chunk_groups(run, axes, stage)
        stay = (group.micro_batches for group in self.groups if group is not None and group.stays)
        self.waiting = self.plan.hidden_bytes * max(stay, default=1) if axes.pp > 1 else 0

    def peak(self, table: RecomputeTable) -> int:
        """The most bytes, by a table of what backward computes again."""
        return self.waiting + peak_bytes(self.instructions, self._chunks(table))

    def least_work(self, when: Sequence[Moment], budget: int) -> tuple[RecomputeTable, Selection] | None:
        """What fits the budget with the fewest operations for one sample: what is computed again of the stage's blocks,
        and how it was selected. None if nothing fits. when: the moments of the stage's list.
        """
        plain = (NONE,) * self.plan.run.model.num_layers
        before = self._places(when, plain)

        def change(number: int, again: str) -> NDArray[np.int64]:
            return self._places(when, (*plain[:number], again, *plain[number + 1 :])) - before

        alike = [blocks for spec in self.specs for blocks in _alike(self.plan, spec, change)]
        selection = select([blocks.options for blocks in alike], budget - self.waiting - before)
        if selection is None:
            return None
        chosen = dict[int, str]()
        for blocks, option in zip(alike, selection.options, strict=True):
            chosen |= zip(blocks.numbers, blocks.kinds(option), strict=True)
        return tuple(chosen[number] for spec in self.specs for number in spec.blocks), selection

    def _places(self, when: Sequence[Moment], table: RecomputeTable) -> NDArray[np.int64]:
        """The bytes within each of these moments, while it works on each of its units, by a table as above."""
        chunks = self._chunks(table)
        return np.array([nbytes for moment in when for nbytes in places(moment, chunks)])

    def _chunks(self, table: RecomputeTable) -> list[ChunkBytes]:
        return [chunk_bytes(self.plan, spec, table, group) for spec, group in zip(self.specs, self.groups, strict=True)]


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of a chunk that are equal in bytes and operations, in the order of the chunk.

    changes  by what is computed again of a block, for each block how many bytes more a stage holds at each place
    works    the operations of that
    """

    numbers: Sequence[int]
    changes: Mapping[str, Sequence[NDArray[np.int64]]]
    works: Mapping[str, int]

    @property
    def options(self) -> OptionGroup:
        """Each number of blocks that are recomputed as a whole, and of those that are recomputed at all."""
        whole, some = self._counts
        before = {again: np.cumsum([changes[0] * 0, *changes], 0) for again, changes in self.changes.items()}
        return OptionGroup(
            whole * self.works[FULL] + (some - whole) * self.works[SELECTIVE],
            before[FULL][whole] + before[SELECTIVE][some] - before[SELECTIVE][whole],
        )

    def kinds(self, option: int) -> RecomputeTable:
        """What is computed again of each block."""
        whole, some = (counts[option] for counts in self._counts)
        return (FULL,) * whole + (SELECTIVE,) * (some - whole) + (NONE,) * (len(self.numbers) - some)

    @property
    def _counts(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return np.triu_indices(len(self.numbers) + 1)


def _alike(
    plan: ActivationPlan, spec: StageSpec, change: Callable[[int, str], NDArray[np.int64]]
) -> Iterator[EqualBlocks]:
    """The blocks of a chunk, equal ones together. change: how many bytes more a stage holds at each place."""
    works = {again: again_flops(plan.run.model, (again,) * plan.run.model.num_layers) for again in RECOMPUTE}
    alike = defaultdict[object, list[int]](list)
    for number in spec.blocks:
        alike[tuple((plan.block(number, again), works[again][number]) for again in RECOMPUTE)].append(number)
    for numbers in alike.values():
        changes = {again: [change(number, again) for number in numbers] for again in (SELECTIVE, FULL)}
        yield EqualBlocks(numbers, changes, {again: works[again][numbers[0]] for again in changes})


def activation_peaks(run: Run, axes: Axes, kind: str) -> list[int]:
    """Bytes of activations that a rank of each stage holds at most, by `recompute_table`, with messages that wait."""
    table = recompute_table(run, axes, kind)
    return [StageActivations(run, axes, stage, kind).peak(table) for stage in range(axes.pp)]


def gathered_inputs(run: Run, axes: Axes, kind: str) -> list[int]:
    """Bytes of inputs of recomputed blocks that a rank of each stage gathers over tp in a step of a run with
    --shard-recompute-inputs: all-gathers' outputs.
    """
    table = recompute_table(run, axes, kind)
    plan, times = activation_plan(run, kind), run.parallel.tp * micro_batches_of(run, axes)
    inputs = [plan.block(number, FULL).input * times if again == FULL else 0 for number, again in enumerate(table)]
    return [sum(inputs[number] for spec in specs for number in spec.blocks) for specs in specs_by_stage(run)]
