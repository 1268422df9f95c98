"""A run is resolved and checked: by a start before anything is made, by ranks that have met, and by --validate-only and
--print-config, which start nothing.

All make the same calls. Files are opened, the run is resolved, and every problem is collected. Data are not read to
their end here, and the default corpus is not made: `prepare` does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megazero.checkpoint.agreement import found_by_rank_0
from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import require_sizes
from megazero.checkpoint.resume_changes import compare
from megazero.config.derive import whole_steps
from megazero.config.dump import dump, plain_value
from megazero.config.parse import ParsedArguments
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError, Decision
from megazero.data.build import cache_root
from megazero.data.corpus import EOD_ID, VOCAB_SIZE, planned_corpus
from megazero.data.indexed import DataError
from megazero.data.own import OwnData
from megazero.data.progress import silent
from megazero.mpu.grid import ProcessGrid
from megazero.plan.budgets import has_budgets, order_notes
from megazero.plan.rank_state import has_nccl, micro_batches_of
from megazero.plan.recompute import ASSUMED
from megazero.plan.step_lists import StageLists
from megazero.plan.step_times import ASSUMED as ASSUMED_RATES
from megazero.plan.step_times import read_rates
from megazero.report.report_json import write_report
from megazero.report.run_report import gather
from megazero.report.verdict import verdict
from megazero.system import device as devices
from megazero.train.epochs import Epoch, epoch_of
from megazero.train.measured_rates import measured_rates
from megazero.train.path_checks import CheckedPaths, check_paths, checkpoints_in_the_way, of_checkpoint, start_position
from megazero.train.placed import room_here
from megazero.train.requirements import budget_problems, machine_problems, path_problems, room_problems
from megazero.train.resolve import Facts, ResolvedRun, Vocabulary, contradictions, decided, resolve
from megazero.train.run_memory import write_memory_trace
from megazero.train.same_data import saved_run
from megazero.train.whole_steps import left_problems

_STILL_OPEN = {
    "vocab_size": "vocab_size, which the tokenizer says and could not be read",
    "train_length": "train_length, which has the samples of --epochs once the data are read",
    "micro_batch_order": "micro_batch_order, which depends on what a card keeps of attention",
    "placement": "placement auto, which the start chooses at measured rates",
}
"""By field of `ResolvedRun.left_open`: what a printed configuration says of it."""
_UNKNOWN_VOCABULARY = (
    "--skip-files: --tokenizer {} says how many tokens the model has, and is not read; give --vocab-size for this "
    "check, or leave out --skip-files"
)


@dataclass(frozen=True)
class Asked:
    """A run that is resolved as far as it can be before its data are read.

    resolved      the run, with the facts that it was resolved from
    local_ranks   the ranks of this host, which share its memory and disks; empty: the run is meant for other machines
    own_data      data and tokenizer of a program
    paths         what the run names, opened
    unresolvable  why a decision is not possible: epochs that fill no batch, budgets that no placement keeps, rates
                  that cannot be read, decided values that contradict settings
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
    unresolvable += tuple(contradictions(resolved))
    return Asked(resolved, local_ranks, own_data, paths, unresolvable, reads_files)


def check_start(begun: Asked) -> list[str]:
    """Everything that is wrong with a run that is resolved, apart from the machine (`requirements.machine_problems`).
    Writes nothing and communicates nothing.
    """
    asked, run, facts = begun.resolved.asked, begun.resolved.run, begun.resolved.facts
    problems = [*begun.paths.problems, *begun.own_data.problems(asked), *begun.unresolvable]
    if begun.reads_files:
        problems += resume_problems(begun.resolved, begun.paths)
        if not path_problems(asked.offload):
            problems += room_problems(run, facts.world_size, begun.local_ranks)
    budgets = budget_problems(run, facts.world_size, tries_cards=facts.tries_kernels, local_ranks=begun.local_ranks)
    return [*problems, *budgets]


def resume_problems(resolved: ResolvedRun, paths: CheckedPaths) -> list[str]:
    """Why the run may not resume from its checkpoint, by comparison of the two configurations. What is not known yet
    of the run is not compared: `prepare` compares again.
    """
    run, resumed = resolved.run, paths.resumed
    if resumed is None:
        return []
    saved = saved_run(resumed, run)
    if not (run.data.data_path or run.data.instruction_data) or (
        paths.tokenizer is None and resolved.asked.data.tokenizer is not None
    ):
        # of a program, of the default corpus that the start makes, or with a tokenizer that is a problem of its own
        names = "data_path", "instruction_data", "tokenizer", "tokenizer_path", "eod_id"
        saved = replace(saved, data=replace(saved.data, **{name: getattr(run.data, name) for name in names}))
    if run.schedule.epochs is not None:
        saved = replace(saved, schedule=replace(saved.schedule, train_length=run.schedule.train_length))
    return of_checkpoint(resumed, compare(saved, run, resumed.layout, resolved.axes.sizes).problems)


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


def dry_run_text(parsed: ParsedArguments, ranks_here: int) -> str:
    """The text for standard output. ranks_here: the number of ranks without --world-size and --ranks.

    Raises ConfigError with everything that a start would report.
    """
    command = parsed.command
    ranks = command.world_size or command.ranks or ranks_here
    local_ranks = range(ranks if command.world_size is None else 0)
    begun = asked_start(parsed.run, ranks, local_ranks, reads_files=not command.skip_files, searches=True)
    texts = []
    if command.print_config:
        open_fields = [f"# not decided here: {_STILL_OPEN[field]}\n" for field in begun.resolved.left_open]
        texts.append(("".join(open_fields) + dump(begun.resolved.run)).rstrip())
    if command.validate_only:
        texts.append(_verdict(parsed, begun))
    elif begun.unresolvable:
        raise ConfigError(begun.unresolvable)
    return "\n\n".join(texts)


def _verdict(parsed: ParsedArguments, begun: Asked) -> str:
    """The answer to a run with which nothing is wrong. Writes the files of --memory-trace and --report-json."""
    resolved, run = begun.resolved, begun.resolved.run
    problems, of_machine = check_start(begun), machine_problems(run)
    notes, unchecked = [*parsed.notes], list[str]()
    if begun.local_ranks:
        problems = [*of_machine, *problems]
    else:
        unchecked += [f"the machines of these ranks; this one would say: {problem}" for problem in of_machine]
        unchecked += ["the machines of these ranks, their memory above all"] * (not of_machine)
    if parsed.command.skip_files:
        unchecked.append("data, tokenizer, checkpoints and places to write into: --skip-files")
        if run.model.vocab_size is None:
            problems.append(_UNKNOWN_VOCABULARY.format(run.data.tokenizer))
    else:
        resumed = begun.paths.resumed
        if resumed is not None:
            try:  # in a start one rank looks at the sizes of files, because there may be as many ranks
                require_sizes(resumed)
            except CheckpointError as error:
                problems.append(f"--load {run.checkpoint.load}: {error}")
        if whole_steps(run.offload) and not problems:  # without their folders there are none
            nccl = has_nccl(run.parallel, resolved.axes)
            problems += left_problems(run, resolved.axes, begun.local_ranks, resumed, nccl=nccl)
        notes += checkpoints_in_the_way(run.checkpoint, start_position(run, resumed)[0])
        unchecked.append(_unread(parsed.run))
    if problems:
        raise ConfigError(problems)
    notes += order_notes(parsed.run, run, micro_batches_of(run, resolved.axes))
    if run.offload.placement == AUTO:
        # Bytes say whether any placement keeps to the budgets, whatever the rates are. This raises if none does.
        assumed = ASSUMED_RATES[resolved.facts.kind]
        assumed = assumed if run.offload.nvme_path else replace(assumed, read=None, write=None)
        resolve(resolved.asked, replace(resolved.facts, rates=assumed))
        unchecked.append(
            "--placement auto: the start measures the machine and chooses; with --placement-rates this does"
        )
    return _report_of(resolved, parsed.changed_settings(), notes, unchecked)


def _unread(run: Run) -> str:
    """The checks that take time, and which only the start of the run makes."""
    if run.data.instruction_data:
        return "what the conversations say, and how many samples they fill: they are read at the start"
    if run.data.data_path:
        return "each token id, and how many samples there are: the files are read at the start"
    return "the default corpus: it is made at the start, where it is not there yet"


def _report_of(resolved: ResolvedRun, given: Mapping[str, Any], notes: Sequence[str], unchecked: list[str]) -> str:
    run = resolved.run
    steps = StageLists(run, resolved.axes, nccl=has_nccl(run.parallel, resolved.axes))
    trace = write_memory_trace(steps, resolved.facts.kind)
    report = gather(steps)
    if report.memory.assumed:
        predictions = {
            "--memory-trace": trace is not None,
            "memory budgets": has_budgets(run),
            "--report-json": run.trainer.report_json is not None,
        }
        untried = f"no card is here to try the bodies of attention; {ASSUMED} was assumed"
        unchecked += [f"{prediction}: {untried}" for prediction, is_made in predictions.items() if is_made]
    report = replace(
        report,
        given=given,
        decisions=resolved.decisions,
        placement=resolved.placement,
        notes=tuple(notes),
        trace=trace or "",
        unchecked=tuple(unchecked),
    )
    write_report(report)
    return verdict(report)
