"""What a start checks before anything is made: files are opened, the run is resolved, and every problem is collected.

A start and --validate-only make the same call. Data are not read to their end here, and the default corpus is not made:
`prepare` does that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import compare
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.build import cache_root
from megazero.data.corpus import EOD_ID, VOCAB_SIZE, Corpus, planned_corpus
from megazero.data.indexed import DataError
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.data.tokenizer import Tokenizer
from megazero.mpu.axes import Axes
from megazero.plan.rates import MachineRates, read_rates
from megazero.system import device as devices
from megazero.train.disk_checks import folder_problems, room_problems
from megazero.train.epochs import Epoch, epoch_of
from megazero.train.path_checks import CheckedPaths, check_paths, of_checkpoint
from megazero.train.placed import room_here
from megazero.train.requirements import budget_problems, machine_problems
from megazero.train.resolve import Facts, ResolvedRun, Vocabulary, resolve
from megazero.train.same_data import saved_run


@dataclass(frozen=True)
class Where:
    """Which ranks of a run this process answers for.

    world_size  number of all ranks
    here        the ranks of this host, which share its memory and disks; empty: the run is meant for other machines
    """

    world_size: int
    here: range

    @staticmethod
    def all_here(world_size: int) -> Where:
        return Where(world_size, range(world_size))


@dataclass(frozen=True)
class Asked:
    """A run that is resolved as far as it can be before its data are read.

    resolved      the run, with the facts that it was resolved from
    where         the ranks that this process answers for
    own           data and tokenizer of a program
    paths         what the run names, opened
    unresolvable  why no decision is possible: epochs that fill no batch, budgets that no placement keeps
    reads_files   False for --skip-files
    searches      whether this process tries kernels on a card and searches for a placement
    """

    resolved: ResolvedRun
    where: Where
    own: OwnData
    paths: CheckedPaths
    unresolvable: tuple[str, ...]
    reads_files: bool
    searches: bool


@dataclass(frozen=True)
class Checked:
    """A run that is resolved and checked.

    resolved   the run, with the facts that it was resolved from
    tokenizer  the program's own or the run's; None without one, or if it cannot be opened
    found      the checkpoint that --load would resume from, if there is one
    machine    why this machine cannot run it, one sentence for each reason
    problems   everything else that is wrong, one sentence for each problem
    """

    resolved: ResolvedRun
    tokenizer: Tokenizer | None
    found: FoundCheckpoint | None
    machine: tuple[str, ...]
    problems: tuple[str, ...]


def asked_start(
    asked: Run, where: Where, own: OwnData | None = None, *, reads_files: bool = True, searches: bool = False
) -> Asked:
    """Open what the run names, ask this machine, and resolve the run. Writes nothing and communicates nothing.

    own: data and tokenizer of a program, used instead of the run's. reads_files: False for --skip-files. searches:
    whether this process tries kernels on a card and searches for a placement, as a check does; in a start rank 0 does,
    once the ranks have their cards.
    """
    own = own or OwnData()
    paths = check_paths(asked, own.tokenizer) if reads_files else CheckedPaths()
    facts = _facts(asked, where, own, paths, reads_files=reads_files, tries_kernels=searches)
    if searches and asked.offload.placement == AUTO:
        rates, _ = _given_rates(asked)
        facts = replace(facts, rates=rates, room=room_here(asked, len(where.here)) if where.here else None)
    unresolvable: tuple[str, ...] = ()
    try:
        resolved = resolve(asked, facts)
    except ConfigError as error:
        unresolvable = error.problems
        resolved = resolve(asked, replace(facts, epoch=None, rates=None))  # so that everything else is still checked
    return Asked(resolved, where, own, paths, unresolvable, reads_files, searches)


def check_start(begun: Asked) -> Checked:
    """Check a run that is resolved. Writes nothing and communicates nothing."""
    resolved, where, paths = begun.resolved, begun.where, begun.paths
    asked, run = resolved.asked, resolved.run
    problems = [*paths.problems, *begun.own.problems(asked), *begun.unresolvable]
    if begun.reads_files:
        problems += _resume_problems(asked, resolved, paths.found, paths.tokenizer)
        if not folder_problems(asked.offload.nvme_path):
            problems += room_problems(run, where.world_size, where.here)
    problems += budget_problems(run, where.world_size, tries_cards=begun.searches, here=where.here)
    problems += _given_rates(asked)[1]
    return Checked(resolved, paths.tokenizer, paths.found, tuple(machine_problems(run)), tuple(problems))


def _facts(
    asked: Run, where: Where, own: OwnData, paths: CheckedPaths, *, reads_files: bool, tries_kernels: bool
) -> Facts:
    """What the files and this machine say, apart from rates."""
    kind = devices.kind(asked.parallel.device)
    without_data = own.train is None and not (asked.data.data_path or asked.data.instruction_data)
    vocabulary = None
    if paths.tokenizer is not None:
        vocabulary = Vocabulary(int(paths.tokenizer.vocab_size), paths.tokenizer.eod_id)
    elif without_data:
        vocabulary = Vocabulary(VOCAB_SIZE, EOD_ID)
    return Facts(
        where.world_size,
        kind,
        device=kind if where.here else None,
        corpus=_planned(asked) if without_data and where.here else None,  # its path is one of this host
        vocabulary=vocabulary,
        epoch=_quick_epoch(asked, own) if reads_files else None,
        base=paths.base,
        tries_kernels=tries_kernels or kind == "cpu",
    )


def _planned(asked: Run) -> Corpus | None:
    """The default corpus of a run that names no data; None where the corpus has no source, which the start says."""
    try:
        return planned_corpus(cache_root(asked.data))
    except DataError:
        return None


def _quick_epoch(asked: Run, own: OwnData) -> Epoch | None:
    """An epoch of data that say their size in a header. Conversations have to be packed for that, and a default corpus
    may have to be made: their start counts them.
    """
    if own.train is not None:
        return Epoch(samples=len(own.train))
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


def _resume_problems(
    asked: Run, resolved: ResolvedRun, found: FoundCheckpoint | None, tokenizer: Tokenizer | None
) -> list[str]:
    """Why the run may not resume from this checkpoint, by comparison of the two configurations. Nothing where a part of
    the run is not known yet: `prepare` compares again.
    """
    unknown = (tokenizer is None and asked.data.tokenizer is not None) or resolved.run.schedule.epochs is not None
    if found is None or unknown or not (asked.data.data_path or asked.data.instruction_data):
        return []
    return resume_problems(resolved.run, found, resolved.axes)


def resume_problems(run: Run, found: FoundCheckpoint, axes: Axes) -> list[str]:
    """Why the run may not resume from this checkpoint, by comparison of the two configurations."""
    comparison = compare(saved_run(found, run), run, found.layout, axes.sizes)
    return of_checkpoint(found, comparison.problems)
