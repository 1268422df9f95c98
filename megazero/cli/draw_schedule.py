"""`megazero draw-schedule`: a pipeline schedule in the terminal, with its bubble and what each stage holds."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser
from megazero.pipeline.chunk_times import profiled_times, uniform_times
from megazero.pipeline.draw import DrawOptions, draw
from megazero.pipeline.schedule import CHUNKS, SCHEDULES, forward_only, make_schedule
from megazero.pipeline.simulate import check_complete, simulate

DESCRIPTION = """
Draw a pipeline schedule in the terminal, with its bubble and the activations each stage holds.

Colours on a terminal, plain text elsewhere. Wide schedules continue below; --fit shrinks them to one band instead.
"""
EXAMPLES = (
    "megazero draw-schedule --pp 4 --micro-batches 8",
    "megazero draw-schedule --pp 4 --micro-batches 8 --schedule zb-v",
    "megazero draw-schedule --pp 12 --micro-batches 64 --schedule 1f1b --fit",
    "megazero draw-schedule --pp 8 --micro-batches 24 --schedule zb-h1 --profile 18.522 18.086 9.337 0.601 --fit",
    "python tools/draw_schedule.py --pp 4 --micro-batches 8 --virtual-stages 2 --message-time 0.2",
)


def arguments() -> argparse.ArgumentParser:
    parser = command_parser("draw-schedule", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--pp", "--stages", type=int, default=4, help="pipeline stages (default 4)")
    add("--micro-batches", "-m", type=int, default=8, help="micro-batches of a step (default 8)")
    add("--virtual-stages", type=int, metavar="V", help="model chunks per stage (default 1, of zb-v 2)")
    add("--schedule", choices=SCHEDULES, help="default: 1f1b, with several chunks per stage interleaved")
    add("--forward-time", type=float, default=1.0, metavar="T", help="time of one chunk's forward (default 1)")
    add("--backward-time", type=float, default=2.0, metavar="T", help="time of one chunk's backward (default 2)")
    add(
        "--weight-time",
        type=float,
        metavar="T",
        help="part of a backward's time that is for the weights (default half)",
    )
    add("--message-time", type=float, default=0.0, metavar="T", help="time of one message between stages (default 0)")
    add(
        "--profile",
        type=float,
        nargs=4,
        metavar=("F", "B", "W", "MESSAGE"),
        help="instead: times of a whole stage's forward, backward of inputs and of weights, spread over its chunks, "
        "and of a message",
    )
    add("--forward-only", action="store_true", help="draw the evaluation's schedule")
    add("--width", type=int, help="columns (default: the terminal's)")
    add("--fit", action="store_true", help="shrink to one band")
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    add("--list", type=int, metavar="STAGE", help="print the instructions of one stage instead")
    return parser


def wants_colour(choice: str) -> bool:
    if choice == "auto":
        encodable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        return sys.stdout.isatty() and encodable and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return choice == "always"


def main(argv: Sequence[str]) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    return status_of(lambda: show(args, parser))


def show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print the schedule. Problems of the flags end the program through `parser.error`, with status 2."""
    profile = args.profile or []
    work, messages = (args.forward_time, args.backward_time, *profile[:3]), (args.message_time, *profile[3:])
    if not (all(0 < time < math.inf for time in work) and all(0 <= time < math.inf for time in messages)):
        parser.error("times of work are above 0, those of messages at least 0, and all of them are finite")
    if args.width is not None and args.width < 1:
        parser.error(f"--width {args.width}: must be at least 1")
    if args.weight_time is not None and not 0 < args.weight_time < args.backward_time:
        parser.error(f"--weight-time {args.weight_time:g} is a part of --backward-time {args.backward_time:g}")
    if args.list is not None and not 0 <= args.list < args.pp:
        parser.error(f"--list {args.list}: the stages are 0 to {args.pp - 1}")
    name = args.schedule or ("interleaved" if (args.virtual_stages or 1) > 1 else "1f1b")
    virtual = (CHUNKS[name] or 1) if args.virtual_stages is None else args.virtual_stages
    try:
        schedule = make_schedule(name, args.pp, args.micro_batches, virtual)
    except ValueError as error:
        parser.error(str(error))
    if args.forward_only:
        schedule = tuple(forward_only(stage) for stage in schedule)
    check_complete(schedule, args.micro_batches, virtual, backward=not args.forward_only)
    times = uniform_times(args.pp * virtual, args.forward_time, args.backward_time, args.message_time, args.weight_time)
    report = simulate(schedule, profiled_times(args.pp, virtual, *args.profile) if args.profile else times)
    if args.list is not None:
        print("\n".join(f"{number:4d}  {instruction}" for number, instruction in enumerate(schedule[args.list])))
        return
    chunks = f", {virtual} chunks each" if virtual > 1 else ""
    print(f"{name}: {args.pp} stages{chunks}, {args.micro_batches} micro-batches")
    apart = f" ({report.own_bubble:.2%} where stages need not wait for each other between steps)"
    bubble = f"{report.bubble:.2%}" + apart * (report.longest < report.makespan * (1 - 1e-9))
    print(f"bubble {bubble}; {report.makespan:g} units of time for {max(report.busy):g} of work\n")
    width = args.width or shutil.get_terminal_size((100, 24)).columns
    print(draw(report, DrawOptions(width, wants_colour(args.color), args.fit)))
