"""What a start checks before anything is made: files are opened, the run is resolved, and every problem is collected.

A start and --validate-only make the same call. Data are not read to their end here, and the default corpus is not made:
`prepare` does that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.checkpoint.resume_changes import compare
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import cache_root
from megazero.data.corpus import EOD_ID, VOCAB_SIZE, Corpus, planned_corpus
from megazero.data.indexed import DataError
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.plan.rates import MachineRates, read_rates
from megazero.system import device as devices
from megazero.train.epochs import Epoch, epoch_of
from megazero.train.path_checks import CheckedPaths, check_paths, of_checkpoint
from megazero.train.placed import room_here
from megazero.train.requirements import budget_problems, folder_problems, machine_problems, room_problems
from megazero.train.resolve import Facts, ResolvedRun, Vocabulary, resolve
from megazero.train.same_data import saved_run


@dataclass(frozen=True)
class Where:
    """Which ranks of a run this process answers for.

    world_size  number of all ranks
    local_ranks the ranks of this host, which share its memory and disks; empty: the run is meant for other machines
    """

    world_size: int
    local_ranks: range


@dataclass(frozen=True)
class Asked:
    """A run that is resolved as far as it can be before its data are read.

    resolved      the run, with the facts that it was resolved from
    where         the ranks that this process answers for
    own_data      data and tokenizer of a program
    paths         what the run names, opened
    unresolvable  why a decision is not possible: epochs that fill no batch, budgets that no placement keeps, rates
                  that cannot be read
    reads_files   False for --skip-files
    searches      whether this process tries kernels on a card and searches for a placement
    """

    resolved: ResolvedRun
    where: Where
    own_data: OwnData
    paths: CheckedPaths
    unresolvable: tuple[str, ...]
    reads_files: bool
    searches: bool


@dataclass(frozen=True)
class Problems:
    """What is wrong with a run, one sentence for each problem.

    machine  why this machine cannot run it
    others   everything else
    """

    machine: tuple[str, ...]
    others: tuple[str, ...]


def asked_start(
    asked: Run, where: Where, own_data: OwnData | None = None, *, reads_files: bool = True, searches: bool = False
) -> Asked:
    """Open what the run names, ask this machine, and resolve the run. Writes nothing and communicates nothing.

    own_data: data and tokenizer of a program, used instead of the run's. reads_files: False for --skip-files. searches:
    whether this process tries kernels on a card and searches for a placement, as a check does; in a start rank 0 does,
    once the ranks have their cards.
    """
    own_data = own_data or OwnData()
    paths = check_paths(asked, own_data.tokenizer) if reads_files else CheckedPaths()
    facts = _facts(asked, where, own_data, paths, reads_files=reads_files, searches=searches)
    rates, unresolvable = _given_rates(asked)
    if searches and asked.offload.placement == AUTO:
        facts = replace(
            facts, rates=rates, room=room_here(asked, len(where.local_ranks)) if where.local_ranks else None
        )
    try:
        resolved = resolve(asked, facts)
    except ConfigError as error:
        unresolvable += error.problems
        resolved = resolve(asked, replace(facts, epoch=None, rates=None))  # so that everything else is still checked
    return Asked(resolved, where, own_data, paths, unresolvable, reads_files, searches)


def check_start(begun: Asked) -> Problems:
    """Check a run that is resolved. Writes nothing and communicates nothing."""
    resolved, where = begun.resolved, begun.where
    asked, run = resolved.asked, resolved.run
    problems = [*begun.paths.problems, *begun.own_data.problems(asked), *begun.unresolvable]
    if begun.reads_files:
        problems += resume_problems(resolved, begun.paths)
        if not folder_problems(asked.offload.nvme_path):
            problems += room_problems(run, where.world_size, where.local_ranks)
    problems += budget_problems(run, where.world_size, tries_cards=begun.searches, local_ranks=where.local_ranks)
    return Problems(tuple(machine_problems(run)), tuple(problems))


def _facts(
    asked: Run, where: Where, own_data: OwnData, paths: CheckedPaths, *, reads_files: bool, searches: bool
) -> Facts:
    """What the files and this machine say, apart from rates."""
    kind = devices.kind(asked.parallel.device)
    without_data = own_data.train is None and not (asked.data.data_path or asked.data.instruction_data)
    vocabulary = None
    if paths.tokenizer is not None:
        vocabulary = Vocabulary(int(paths.tokenizer.vocab_size), paths.tokenizer.eod_id)
    elif without_data:
        vocabulary = Vocabulary(VOCAB_SIZE, EOD_ID)
    return Facts(
        where.world_size,
        kind,
        device=kind if where.local_ranks else None,
        # The path is one of this host. A start makes the corpus soon, and need not list its sources twice.
        corpus=_planned(asked) if without_data and where.local_ranks and searches else None,
        vocabulary=vocabulary,
        epoch=_quick_epoch(asked, own_data) if reads_files else None,
        base=paths.base,
        tries_kernels=searches or kind == "cpu",
    )


def _planned(asked: Run) -> Corpus | None:
    """The default corpus of a run that names no data; None where the corpus has no source, which the start says."""
    try:
        return planned_corpus(cache_root(asked.data))
    except DataError:
        return None


def _quick_epoch(asked: Run, own_data: OwnData) -> Epoch | None:
    """An epoch of data that say their size in a header. Conversations have to be packed for that, and a default corpus
    may have to be made: their start counts them.
    """
    if own_data.train is not None:
        return Epoch(samples=len(own_data.train))
    if not asked.data.data_path:
        return None
    try:
        return epoch_of(asked, None, silent)
    except DataError:  # a problem of the paths
        return None


def _given_rates(asked: Run) -> tuple[MachineRates | None, tuple[str, ...]]:
    """The rates of --placement-rates, and what is wrong with the file."""
    if asked.offload.placement_rates is None:
        return None, ()
    try:
        return read_rates(asked.offload.placement_rates), ()
    except ConfigError as error:
        return None, error.problems


def resume_problems(resolved: ResolvedRun, paths: CheckedPaths) -> list[str]:
    """Why the run may not resume from its checkpoint, by comparison of the two configurations. Nothing where a part of
    the run is not known yet: `prepare` compares again.
    """
    asked, run, resumed = resolved.asked, resolved.run, paths.resumed
    unknown = (paths.tokenizer is None and asked.data.tokenizer is not None) or run.schedule.epochs is not None
    if resumed is None or unknown or not (asked.data.data_path or asked.data.instruction_data):
        return []
    return of_checkpoint(resumed, compare(saved_run(resumed, run), run, resumed.layout, resolved.axes.sizes).problems)
