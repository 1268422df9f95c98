"""What an engine has before its modules: a run, a rule of updates, process groups and files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch

from megazero.config.schema import Run
from megazero.launch import world_of
from megazero.mpu.axes import SharingAxes
from megazero.mpu.grid import ProcessGrid
from megazero.own.named_groups import GivenGroups, NamedGroups, named_groups
from megazero.own.planned_memory import MeasuredStep, PlannedMemory, StepMemory
from megazero.own.planned_state import OwnChunks
from megazero.own.rank_units import sharing_stages
from megazero.own.settings import LoopSettings, divided_by, dtype_of_all, placed_by, run_of
from megazero.own.torch_rule import MakeOptimizer, TorchRule
from megazero.own.units.model import Units
from megazero.own.units.refusals import learning_rate
from megazero.telemetry.watchdog import StopSignals
from megazero.train.api import Given
from megazero.train.embedded import process_groups, rendezvous, result_of_rank_0, result_on_all_ranks
from megazero.train.swap_files import StateFiles, state_files

E = TypeVar("E")
TimeUnits = Callable[[Run, torch.device], list[float]]
"""Seconds of each unit in a run on a device."""
LR = 1e-3
"""The learning rate of one of our optimizers, if nobody says another."""


class Opening:
    """It is a context, which ends the groups and removes the files. So does `close`, and where nobody calls that, the
    end of the opening.

    lr     the learning rate until a step says another
    rule   the update of an optimizer of torch; None: the optimizer is one of ours
    files  where columns are that leave the device for disks; None: none does
    group_of
           the number of each parameter's group by its name, where options differ; None: all parameters have the same
    groups
           those that patterns of names make; None: there are none, or a program has others
    memory
           what is known of the memory of a step; None: an engine has the modules already
    """

    def __init__(self, run: Run, lr: float, rule: TorchRule | None) -> None:
        self.run, self.lr, self.rule = run, lr, rule
        self.group_of: Mapping[str, int] | None = None
        self.groups: NamedGroups | None = None
        self.grid: ProcessGrid
        self.files: StateFiles | None
        self.memory: PlannedMemory | None = None

    def take_groups(self, groups: NamedGroups, optimizer: str | MakeOptimizer) -> None:
        """Have groups by patterns of names. optimizer: what was given. Raises ConfigError as `TorchRule`."""
        self.groups, self.group_of = groups, groups.number_of
        if not isinstance(optimizer, str):  # its trial is of each group's options
            self.rule = TorchRule(optimizer, groups.options)

    def enter(self, contexts: ExitStack, grid: ProcessGrid, files: StateFiles | None) -> None:
        """Take over process groups and files with the contexts that end them."""
        self.grid, self.files, self._ends = grid, files, contexts.pop_all()
        self._leaves = weakref.finalize(self, _leave, self._ends)

    def at_end(self, close: Callable[[], None]) -> None:
        """Call this when the opening ends, however it does, in front of what it has had before."""
        self._ends.callback(close)

    def leave_first(self) -> None:
        """Where nobody closes it, remove the files before the lanes end that were made since then: at the end of the
        process what was made last ends first.
        """
        self._leaves.detach()
        self._leaves = weakref.finalize(self, _leave, self._ends)

    def close(self) -> None:
        """End the process groups and remove the files. Called by all ranks."""
        self._leaves.detach()
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._leaves.detach()
        self._ends.__exit__(*raised)


def _leave(contexts: ExitStack) -> None:
    """Remove the files of what nobody closes. Waits for no other rank, which may be gone."""
    with suppress(GeneratorExit):
        contexts.__exit__(GeneratorExit, GeneratorExit(), None)


def opening_of(
    units: Units,
    optimizer: str | MakeOptimizer,
    lr: float | None,
    run: Given | None,
    loop: LoopSettings | None = None,
    signals: StopSignals | None = None,
    time_units: TimeUnits | None = None,
    groups: Sequence[Mapping[str, Any]] = ({},),
    measure: MeasuredStep | None = None,
    named: GivenGroups | None = None,
) -> Opening:
    """What an engine of these units needs. A collective of all ranks.

    loop        what the run needs whose steps megazero's own loop takes; None: the program takes them
    signals     requests to stop
    time_units  called on rank 0, by whose times units are divided among stages; None: by numbers of parameters
    groups      options of groups of parameters that an optimizer of torch has, as `TorchRule` takes them
    measure     called on rank 0, and by its peaks the run is held to its budgets; None: the run has none
    named       groups of parameters by patterns of their names, with options

    Otherwise as `own.engine.engine`.
    """
    meeting = rendezvous()
    environment = meeting.environment

    def resolved() -> Opening:
        name, rule = (optimizer, None) if isinstance(optimizer, str) else _rule_of(optimizer, groups)
        rate = learning_rate(lr if lr is not None else LR if rule is None else rule.lr)
        kept = None if rule is None else rule.kept
        timed = time_units is not None
        has = {"timed": timed, "measured": measure is not None}
        resolved_run = run_of(run or {}, name, units, environment.world_size, kept, lr=rate, loop=loop, **has)
        opening = Opening(resolved_run, rate, rule)
        if named is not None:
            opening.take_groups(named_groups(named, units, rule or resolved_run.optimizer), optimizer)
        return opening

    opening = result_on_all_ranks(resolved, meeting)
    units.keep_dtypes(keeps=dtype_of_all(opening.run) is None)
    world = world_of(opening.run, environment)
    if time_units is not None and opening.run.parallel.pp * opening.run.parallel.virtual_stages > 1:
        times = result_of_rank_0(partial(time_units, opening.run, world.device), meeting, "times of units")
        opening.run = divided_by(opening.run, times)
    step = StepMemory()
    if measure is not None and measure.wanted(opening.run) and not units.is_taken:
        sizes = environment.world_size, environment.local_world_size
        find = partial(measure.found, opening.run, world.device, *sizes)
        step = StepMemory.read(result_of_rank_0(find, meeting, "memory of a step"))
        opening.run = placed_by(opening.run, step.settings) if step.settings else opening.run
    with ExitStack() as contexts:
        if sharing := sharing_stages(units, opening.run):
            world = replace(world, axes=SharingAxes(**vars(world.axes), sharing=sharing))
        grid = contexts.enter_context(process_groups(world, meeting, opening.run.parallel))
        if not units.is_taken:
            chunks = OwnChunks.of(units, opening.run)
            opening.memory = PlannedMemory.of(chunks, opening.run, grid.axes, grid.device.type, step)
        files = contexts.enter_context(state_files(opening.run, grid, None, signals or StopSignals()))
        opening.enter(contexts, grid, files)
    return opening


def _rule_of(optimizer: MakeOptimizer, groups: Sequence[Mapping[str, Any]]) -> tuple[str, TorchRule]:
    rule = TorchRule(optimizer, groups)
    return rule.name, rule


def made_with(opening: Opening, make: Callable[[Opening], E]) -> E:
    """What `make` makes with an opening, which ends where that raises."""
    with ExitStack() as until_made:
        until_made.push(opening)
        made = make(opening)
        until_made.pop_all()
    return made
