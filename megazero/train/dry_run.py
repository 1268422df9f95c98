"""--validate-only and --print-config: check a run as its start would, without starting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import require_sizes
from megazero.config.dump import dump
from megazero.config.parse import ParsedArguments
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.plan import rates
from megazero.plan.budgets import has_budgets
from megazero.plan.bytes import has_nccl
from megazero.plan.order import order_notes
from megazero.plan.recompute import ASSUMED
from megazero.plan.shapes import micro_batches_of
from megazero.plan.step_lists import StageLists
from megazero.report.banner import verdict
from megazero.report.report_json import write_report
from megazero.report.run_report import gather
from megazero.train.checked import Asked, asked_start, check_start
from megazero.train.path_checks import checkpoints_in_the_way, start_position
from megazero.train.requirements import machine_problems
from megazero.train.resolve import ResolvedRun, resolve
from megazero.train.run_memory import write_memory_trace

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
        notes += checkpoints_in_the_way(run.checkpoint, start_position(run, resumed)[0])
        unchecked.append(_unread(parsed.run))
    if problems:
        raise ConfigError(problems)
    notes += order_notes(parsed.run, run, micro_batches_of(run, resolved.axes))
    if run.offload.placement == AUTO:
        _require_a_placement(resolved)
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


def _require_a_placement(resolved: ResolvedRun) -> None:
    """Raise ConfigError if no placement keeps to the budgets. That follows from bytes, whatever the rates are, and is
    not known without a vocabulary.
    """
    assumed, run = rates.ASSUMED[resolved.facts.kind], resolved.asked
    assumed = assumed if run.offload.nvme_path else replace(assumed, read=None, write=None)
    resolve(run, replace(resolved.facts, rates=assumed))


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
