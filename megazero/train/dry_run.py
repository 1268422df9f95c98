"""--validate-only and --print-config: check a run as its start would, without starting it."""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.format import CheckpointError
from megazero.checkpoint.manager import FoundCheckpoint, require_sizes
from megazero.config.count import parameters
from megazero.config.dump import dump
from megazero.config.parse import ParsedArguments
from megazero.config.placement import AUTO, applied
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes, axes_of
from megazero.plan import rates
from megazero.plan.budgets import has_budgets
from megazero.plan.bytes import has_nccl, stage_bytes
from megazero.plan.order import order_within_budgets
from megazero.plan.recompute import ASSUMED
from megazero.plan.shapes import micro_batches_of
from megazero.plan.step_lists import StageLists
from megazero.system import device as devices
from megazero.telemetry.units import count
from megazero.train import banner_parts as parts
from megazero.train import text_blocks as blocks
from megazero.train.banner import placement_lines, schedule_lines
from megazero.train.memory_budgets import peaks_table
from megazero.train.memory_trace import trace_of_plan
from megazero.train.ordered import order_notes
from megazero.train.path_checks import check_paths, checkpoints_in_the_way, start_position
from megazero.train.placed import Placed, chosen, rates_problems, with_choice
from megazero.train.requirements import budget_problems, machine_problems, with_default_vocabulary

_UNKNOWN_VOCABULARY = (
    "--skip-files: --tokenizer {} says how many tokens the model has, and is not read; give --vocab-size for this "
    "check, or leave out --skip-files"
)


def dry_run_text(parsed: ParsedArguments, ranks_here: int) -> str:
    """The text for standard output. ranks_here: the number of ranks without --world-size and --ranks.

    Raises ConfigError with everything that a start would report.
    """
    ranks = parsed.command.world_size or parsed.command.ranks or ranks_here
    here = ranks if parsed.command.world_size is None else None
    told = [dump(_placed(parsed.run, ranks, here).run).rstrip()] if parsed.command.print_config else []
    if parsed.command.validate_only:
        told.append(_verdict(parsed, ranks, here))
    return "\n\n".join(told)


def _placed(run: Run, ranks: int, here: int | None) -> Placed:
    """The run with the placement that --placement auto would choose, where the rates are given and the vocabulary is
    known; else as it is. here: as in `placed.chosen`.
    """
    known = with_default_vocabulary(run)
    if run.offload.placement != AUTO or run.offload.placement_rates is None or known.model.vocab_size is None:
        return Placed(run)
    axes, kind = axes_of(run, ranks), devices.kind(run.parallel.device)
    found = chosen(known, axes, kind, None, here, nccl=has_nccl(run.parallel, axes))
    return Placed(with_choice(run, dict(found.settings)), found.told)


def _require_a_placement(run: Run, axes: Axes, kind: str, here: int | None) -> None:
    """Raise ConfigError if no placement keeps to the budgets. That follows from bytes, whatever the rates are, and is
    not known without a vocabulary.
    """
    if run.model.vocab_size is None:
        return
    assumed = rates.ASSUMED[kind]
    assumed = assumed if run.offload.nvme_path else replace(assumed, read=None, write=None)
    chosen(run, axes, kind, assumed, here, nccl=has_nccl(run.parallel, axes))


def _verdict(parsed: ParsedArguments, ranks: int, placed_here: int | None) -> str:
    run, problems, left, notes = parsed.run, list[str](), list[str](), [*parsed.notes]
    against, here = machine_problems(run), range(ranks if parsed.command.world_size is None else 0)
    if parsed.command.world_size is None:
        problems += against
    else:
        left += [f"the machines of these ranks; this one would say: {sentence}" for sentence in against]
        left += ["the machines of these ranks, their memory above all"] * (not against)
    if parsed.command.skip_files:
        left.append("data, tokenizer, checkpoints and places to write into: --skip-files")
        if with_default_vocabulary(run).model.vocab_size is None:
            raise ConfigError([*problems, _UNKNOWN_VOCABULARY.format(run.data.tokenizer)])
    else:
        present = check_paths(run, ranks, here=here)
        run, problems = present.run, [*problems, *present.problems]
        if present.found is not None:
            problems += _damage(run, present.found)
        notes += checkpoints_in_the_way(run.checkpoint, start_position(run, present.found)[0])
        left.append(_unread(run))
    asked, axes, kind = run, axes_of(run, ranks), devices.kind(run.parallel.device)
    run = applied(run, order_within_budgets(with_default_vocabulary(run), axes, kind))
    notes += order_notes(asked, run, micro_batches_of(run, axes))
    problems += [*budget_problems(run, ranks, tries_cards=True, here=here), *rates_problems(run)]
    if problems:
        raise ConfigError(problems)
    placed = _placed(with_default_vocabulary(run), ranks, placed_here)
    if placed.run.offload.placement == AUTO:
        _require_a_placement(with_default_vocabulary(run), axes, kind, placed_here)
        left.append("--placement auto: the start measures the machine and chooses; with --placement-rates this does")
    return _told(placed, ranks, notes, left)


def _damage(run: Run, found: FoundCheckpoint) -> list[str]:
    """A problem of the checkpoint's files. In a start one rank looks at them, because there may be as many ranks."""
    try:
        require_sizes(found)
    except CheckpointError as error:
        return [f"--load {run.checkpoint.load}: {error}"]
    return []


def _unread(run: Run) -> str:
    """The checks that take time, and which only the start of the run makes."""
    if run.data.instruction_data:
        return "what the conversations say, and how many samples they fill: they are read at the start"
    if run.data.data_path:
        return "each token id, and how many samples there are: the files are read at the start"
    return "the default corpus: it is made at the start, where it is not there yet"


def _told(placed: Placed, ranks: int, notes: list[str], left: list[str]) -> str:
    run = placed.run
    axes = axes_of(run, ranks)
    zero = parts.zero(run.parallel.zero_stage, axes)
    head = f"OK: {parts.ranks(axes.tp, axes.pp, axes.dp)}; {run.optimizer.precision}, {zero}"
    if run.model.vocab_size is None:
        left.append("bytes: how many tokens there are is the tokenizer's to say; or give --vocab-size")
        table = ""
    else:
        head += f", {count(parameters(run.model))} parameters"
        table = parts.stage_table(stage_bytes(run, axes))
    kind, steps = devices.kind(run.parallel.device), StageLists(run, axes, nccl=has_nccl(run.parallel, axes))
    traced = trace_of_plan(steps, kind)
    asked = {"--memory-trace": traced is not None, "memory budgets": has_budgets(run)}
    for what in (what for what, told in asked.items() if told and kind == "cuda" and not devices.cuda_available()):
        left.append(f"{what}: no card is here to try the bodies of attention; {ASSUMED} was assumed")
    sections = [
        (head, blocks.pairs([*placement_lines(placed.told), *schedule_lines(steps)])),
        ("Bytes of the model state on a rank of each stage (activations come on top)", table),
        ("Memory of a step", traced or ""),
        ("Peaks of a step on a rank of each stage", peaks_table(run, ranks, kind)),
        ("Worth knowing", blocks.bullets(notes)),
        ("Not checked", blocks.bullets(left)),
    ]
    return blocks.sections(sections)
