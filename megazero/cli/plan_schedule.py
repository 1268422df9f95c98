"""`megazero plan-schedule`: learning rate, batch size and consumed samples of any iteration, without a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from itertools import chain

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, pop_flag
from megazero.cli.shared_flags import model_of
from megazero.config.parse import ConfigError, parse_run
from megazero.config.schema import ScheduleConfig
from megazero.optim.step_plan import StepPlan
from megazero.system.reading import BOUNDS
from megazero.system.status import MISTAKEN

DESCRIPTION = """
Learning rate, batch size and consumed samples of any iteration of a run, without starting one.

One JSON line each: `iteration`, `consumed_samples` (after it), `lr` (used in it), `global_batch_size`. All flags of
`megazero pretrain` are understood; what depends on the number of ranks is not checked.
"""
EXAMPLES = (
    "megazero plan-schedule --preset bloom-176b --iterations 1,100,12695,31214",
    "python tools/show_schedule.py --iterations 1-5,100 --train-iters 100 --lr 3e-4 --lr-warmup-iters 10",
)
FLAG = "--iterations"
PART = re.compile(r"([0-9]{1,16})(?:-([0-9]{1,16}))?")
"""A number, or the first and the last of a range."""
PRINTED = "iteration", "consumed_samples", "lr", "global_batch_size"
"""The numbers of a step that are printed."""


def parse_iterations(text: str) -> list[range]:
    """The numbers in "1,100,5-8". A range is not written out: it may be of any length. Raises ValueError."""
    ranges = []
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= BOUNDS.count:
            raise ValueError(f"{part.strip()} does not count up within 1 and {BOUNDS.count:,}")
        ranges.append(range(first, last + 1))
    return ranges


def milestones(progress: StepPlan) -> list[range]:
    """Powers of ten and the last iteration."""
    last = progress.total_iterations or 1
    numbers = sorted({10**k for k in range(len(str(last)))} | {last})
    return [range(number, number + 1) for number in numbers]


def show(schedule: ScheduleConfig, iterations: Sequence[range] | None) -> None:
    progress = StepPlan(schedule)
    total = progress.total_iterations
    for iteration in chain.from_iterable(milestones(progress) if iterations is None else iterations):
        step = progress.step(iteration)
        print(json.dumps({name: getattr(step, name) for name in PRINTED}), flush=True)
        if total is not None and iteration > total:
            print(f"iteration {iteration} lies behind the end of this run, which has {total}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & {*argv}:
        # A parser for the help only: all flags but one are those of a run, which `parse_run` reads.
        flags = command_parser("plan-schedule", DESCRIPTION, EXAMPLES)
        listed_help = "numbers and ranges, as 1,100,5-8 (default: powers of ten, the last)"
        flags.add_argument(FLAG, metavar="LIST", help=listed_help)
        flags.print_help()
        return 0
    listed, run_flags = pop_flag(argv, FLAG)
    problems: list[str] = []
    try:
        iterations = None if listed is None else parse_iterations(listed)
    except ValueError as error:
        problems.append(f"{FLAG} {listed}: {error}; give numbers from 1 with commas between, as 1,100 or 1-5")
    try:
        schedule = parse_run(run_flags, None, model_of).schedule
        if schedule.epochs is not None:
            problems.append(
                f"--epochs {schedule.epochs:g}: how many samples these are, only the data say; give --train-samples"
            )
    except ConfigError as error:
        problems += error.problems
    if problems:
        print(ConfigError(problems), file=sys.stderr)
        return MISTAKEN
    return status_of(lambda: show(schedule, iterations), (ValueError,))
