"""What a start checks: files are opened, the run is resolved, and every problem is collected before anything is made.
What only ranks that have met can decide is resolved later, in `resolved_on_all_ranks`.

A start and --validate-only make the same calls. Data are not read to their end here, and the default corpus is not
made: `prepare` does that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megazero.checkpoint.agreement import found_by_rank_0
from megazero.checkpoint.resume_changes import compare
from megazero.config.dump import plain_value
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError, Decision
from megazero.data.build import cache_root
from megazero.data.corpus import EOD_ID, VOCAB_SIZE, planned_corpus
from megazero.data.indexed import DataError
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.mpu.grid import ProcessGrid
from megazero.plan.rates import read_rates
from megazero.system import device as devices
from megazero.train.epochs import Epoch, epoch_of
from megazero.train.measured_rates import measured_rates
from megazero.train.path_checks import CheckedPaths, check_paths, of_checkpoint
from megazero.train.placed import room_here
from megazero.train.requirements import budget_problems, folder_problems, room_problems
from megazero.train.resolve import Facts, ResolvedRun, Vocabulary, decided, resolve
from megazero.train.same_data import saved_run


@dataclass(frozen=True)
class Asked:
    """A run that is resolved as far as it can be before its data are read.

    resolved      the run, with the facts that it was resolved from
    local_ranks   the ranks of this host, which share its memory and disks; empty: the run is meant for other machines
    own_data      data and tokenizer of a program
    paths         what the run names, opened
    unresolvable  why a decision is not possible: epochs that fill no batch, budgets that no placement keeps, rates
                  that cannot be read
    reads_files   False for --skip-files
    """

    resolved: ResolvedRun
    local_ranks: range
    own_data: OwnData
    paths: CheckedPaths
    unresolvable: tuple[str, ...]
    reads_files: bool


def asked_start(
    asked: Run,
    world_size: int,
    local_ranks: range,
    own_data: OwnData | None = None,
    *,
    reads_files: bool = True,
    searches: bool = False,
) -> Asked:
    """Open what the run names, ask this machine, and resolve the run. Writes nothing and communicates nothing.

    local_ranks, own_data, reads_files: as in `Asked`. searches: whether this process tries kernels on a card and
    searches for a placement, as a check does; in a start rank 0 does, once the ranks have their cards.
    """
    own_data = own_data or OwnData()
    paths = check_paths(asked, own_data.tokenizer) if reads_files else CheckedPaths()
    names_data = bool(asked.data.data_path or asked.data.instruction_data)
    takes_default, kind = own_data.train is None and not names_data, devices.kind(asked.parallel.device)
    vocabulary = Vocabulary(VOCAB_SIZE, EOD_ID) if takes_default else None
    if paths.tokenizer is not None:
        vocabulary = Vocabulary(int(paths.tokenizer.vocab_size), paths.tokenizer.eod_id)
    corpus = epoch = rates = room = None
    # The path is one of this host. A start makes the corpus soon, and need not list its sources twice.
    if takes_default and local_ranks and searches:
        with suppress(DataError):  # there is no source, which the start says
            corpus = planned_corpus(cache_root(asked.data))
    if reads_files and own_data.train is not None:
        epoch = Epoch(samples=len(own_data.train))
    elif reads_files and asked.data.data_path:  # the start counts conversations and the default corpus: it reads them
        with suppress(DataError):  # a problem of the paths
            epoch = epoch_of(asked, None, silent)
    unresolvable: tuple[str, ...] = ()
    if asked.offload.placement_rates is not None:
        try:
            rates = read_rates(asked.offload.placement_rates)
        except ConfigError as error:
            unresolvable = error.problems
    if asked.offload.placement == AUTO and searches and local_ranks:
        room = room_here(asked, len(local_ranks))
    facts = Facts(
        world_size,
        kind,
        device=kind if local_ranks else None,
        corpus=corpus,
        vocabulary=vocabulary,
        epoch=epoch,
        base=paths.base,
        tries_kernels=searches or kind == "cpu",
        rates=rates if searches else None,
        room=room,
    )
    try:
        resolved = resolve(asked, facts)
    except ConfigError as error:
        unresolvable += error.problems
        resolved = resolve(asked, replace(facts, epoch=None, rates=None))  # so that everything else is still checked
    return Asked(resolved, local_ranks, own_data, paths, unresolvable, reads_files)


def check_start(begun: Asked) -> list[str]:
    """Everything that is wrong with a run that is resolved, apart from the machine (`requirements.machine_problems`).
    Writes nothing and communicates nothing.
    """
    asked, run, facts = begun.resolved.asked, begun.resolved.run, begun.resolved.facts
    problems = [*begun.paths.problems, *begun.own_data.problems(asked), *begun.unresolvable]
    if begun.reads_files:
        problems += resume_problems(begun.resolved, begun.paths)
        if not folder_problems(asked.offload.nvme_path):
            problems += room_problems(run, facts.world_size, begun.local_ranks)
    budgets = budget_problems(run, facts.world_size, tries_cards=facts.tries_kernels, local_ranks=begun.local_ranks)
    return [*problems, *budgets]


def resume_problems(resolved: ResolvedRun, paths: CheckedPaths) -> list[str]:
    """Why the run may not resume from its checkpoint, by comparison of the two configurations. Nothing where a part of
    the run is not known yet: `prepare` compares again.
    """
    asked, run, resumed = resolved.asked, resolved.run, paths.resumed
    unknown = (paths.tokenizer is None and asked.data.tokenizer is not None) or run.schedule.epochs is not None
    if resumed is None or unknown or not (asked.data.data_path or asked.data.instruction_data):
        return []
    return of_checkpoint(resumed, compare(saved_run(resumed, run), run, resumed.layout, resolved.axes.sizes).problems)


def resolved_on_all_ranks(started: ResolvedRun, grid: ProcessGrid, ranks_here: int) -> ResolvedRun:
    """The final run: what the ranks' files have left open is decided on rank 0, and every rank takes its decisions.

    Left open are the order of micro-batches on cards, and a placement at measured rates. Rank 0 alone decides, because
    the search for a placement takes seconds of all cores, and because two cards may keep different bytes of attention.
    ranks_here: the ranks of this host, which share its memory and its disks. If something is open this is a collective
    of the world: `found_by_rank_0`, and for --placement auto without --placement-rates the measurement
    (`train.measured_rates`). Raises ConfigError on all ranks if nothing keeps to the budgets.
    """
    if not started.left_open:
        return started
    facts = facts_together(started, grid, ranks_here)

    def made() -> dict[str, Any]:
        """The decisions as JSON has them; `config.placement.applied` reads values from their words."""
        resolved = resolve(started.asked, facts)
        decisions = [(decision.field, plain_value(decision.value), decision.why) for decision in resolved.decisions]
        return {"decisions": decisions, "placement": resolved.placement}

    answer = found_by_rank_0(grid.world, grid.device, made)
    decisions = tuple(Decision(*decision) for decision in answer["decisions"])
    resolved = decided(started.asked, facts, decisions, tuple(answer["placement"]))
    assert not resolved.left_open, resolved.left_open
    return resolved


def facts_together(started: ResolvedRun, grid: ProcessGrid, ranks_here: int) -> Facts:
    """The facts with what the ranks learn when they have met. A collective where rates are measured."""
    run, facts = started.run, replace(started.facts, tries_kernels=True, nccl=grid.world.is_on_device)
    if run.offload.placement != AUTO:
        return facts
    file = run.offload.placement_rates
    rates = measured_rates(run, grid) if file is None else read_rates(file)
    return replace(facts, rates=rates, room=room_here(run, ranks_here))
