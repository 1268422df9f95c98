"""`megazero draw-schedule`: a pipeline schedule, or a whole step, in the terminal, with its bubble and its memory."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, flag_of, not_positive
from megazero.config.tiers import Tier
from megazero.pipeline.schedule import CHUNKS, SCHEDULES, chunk_map, forward_only, is_breadth_first, make_schedule
from megazero.program.checker import check
from megazero.program.example import GRADIENT_BYTES, PARAMETER_BYTES, STATE_BYTES, ExampleModel
from megazero.program.instruction import READ_LANES, WRITE_LANES, Lane
from megazero.program.passes.vertical import VerticalOrder
from megazero.program.scope import ON_TIME
from megazero.program.shape import RankShape
from megazero.program.simulate import SimulationReport, schedule_shape, simulate
from megazero.program.step import StepOptions, evaluation_step, training_step
from megazero.program.times import ChunkTimes, profiled_times, uniform_times
from megazero.report.schedule_picture import DrawOptions, draw
from megazero.system.words import counted

DESCRIPTION = """
Draw a pipeline schedule in the terminal, with its bubble and the activations each stage holds.

Colours on a terminal, plain text elsewhere. Wide schedules continue below; --fit shrinks them to one band instead.
"""
EXAMPLES = (
    "megazero draw-schedule --pp 4 --micro-batches 8",
    "megazero draw-schedule --pp 4 --micro-batches 8 --schedule zb-v",
    "megazero draw-schedule --pp 12 --micro-batches 64 --schedule 1f1b --fit",
    "megazero draw-schedule --pp 8 --micro-batches 24 --schedule zb-h1 --profile 18.522 18.086 9.337 0.601 --fit",
    "megazero draw-schedule --pp 2 --micro-batches 2 --zero-stage 3 --gathered-units 3",
    "megazero draw-schedule --pp 1 --micro-batches 4 --zero-stage 3 --micro-batch-order vertical",
    "megazero draw-schedule --pp 2 -m 4 --zero-stage 1 --offload-optimizer nvme --late-update",
    "megazero draw-schedule --pp 2 -m 4 --zero-stage 1 --offload-optimizer nvme --early-update",
    "python tools/draw_schedule.py --pp 4 --micro-batches 8 --virtual-stages 2 --message-time 0.2",
)

WHOLE_STEP = (
    "dp zero_shard_size blocks gather_time update_time late_update early_update micro_batch_order vertical_group_size "
    "offload_optimizer offload_params offload_gradients host_update_time disk_time offload_activations copy_time"
).split()
LEAST_STAGE = dict.fromkeys(WHOLE_STEP, 0) | {"gathered_units": 3}
"""The fields of a whole step, and the ZeRO stage from which on each has an effect."""
COUNTS = "width", "pp", "micro_batches", "virtual_stages", "dp", "blocks", "gathered_units", "vertical_group_size"
"""The fields that are at least 1 where they are set."""


def arguments() -> argparse.ArgumentParser:
    parser = command_parser("draw-schedule", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--pp", "--stages", type=int, default=4, help="pipeline stages (default 4)")
    add("--micro-batches", "-m", type=int, default=8, help="micro-batches of a step (default 8)")
    add("--virtual-stages", type=int, metavar="V", help="model chunks per stage (default 1, of zb-v 2)")
    add("--schedule", choices=SCHEDULES, help="default: 1f1b, with several chunks per stage interleaved")
    add("--forward-time", type=float, default=1.0, metavar="T", help="time of one chunk's forward (default 1)")
    add("--backward-time", type=float, default=2.0, metavar="T", help="time of one chunk's backward (default 2)")
    weights = "part of a backward's time that is for the weights (default half)"
    add("--weight-time", type=float, metavar="T", help=weights)
    add("--message-time", type=float, default=0.0, metavar="T", help="time of one message between stages (default 0)")
    profile = (
        "instead: times of a whole stage's forward, backward of inputs and of weights, spread over its chunks, "
        "and of a message"
    )
    add("--profile", type=float, nargs=4, metavar=("F", "B", "W", "MESSAGE"), help=profile)
    add("--forward-only", action="store_true", help="draw the evaluation's schedule")
    add("--width", type=int, help="columns (default: the terminal's)")
    add("--fit", action="store_true", help="shrink to one band")
    add("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    add("--list", type=int, metavar="STAGE", help="print the instructions of one stage instead")
    _add_state(parser)
    return parser


def _add_state(parser: argparse.ArgumentParser) -> None:
    """The flags of a whole step: those of model state."""
    about = (
        "With --zero-stage the picture has the lanes of every stage: computations, gathers and reductions of buckets, "
        "messages. The model has blocks of one size; embedding and head are as large. Every unit is a bucket."
    )
    add = parser.add_argument_group("the whole step", about).add_argument

    def add_time(flag: str, default: float, work: str, more: str = "") -> None:
        add(flag, type=float, default=default, metavar="T", help=f"time of {work} (default {default}){more}")

    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="draw the whole step, with gradients and parameters")
    add("--dp", type=int, default=4, metavar="N", help="replicas (default 4)")
    add("--zero-shard-size", type=int, metavar="K", help="ranks that share the shards of a state (default: all N)")
    add("--blocks", type=int, default=2, metavar="N", help="blocks of every model chunk (default 2)")
    budget = "budget of gathered parameters under ZeRO-3, in units (default 2)"
    add("--gathered-units", type=int, default=2, metavar="N", help=budget)
    add_time("--gather-time", 0.2, "gathering a unit", "; a reduction sends twice as many bytes")
    add_time("--update-time", 0.1, "updating a unit")
    order = "a unit for all micro-batches in turn (default horizontal, with --offload-params nvme vertical)"
    add("--micro-batch-order", choices=("horizontal", "vertical"), help=f"vertical: {order}")
    group = "most micro-batches that pass a unit together (default: all)"
    add("--vertical-group-size", type=int, metavar="N", help=group)
    add("--late-update", action="store_true", help="update a unit in the next step, before its forward")
    add("--early-update", action="store_true", help="update a unit beside the backward, before the norm is known")
    tiers = [tier.value for tier in Tier]
    add("--offload-optimizer", choices=tiers, default=tiers[0], help="where the optimizer state rests (default none)")
    add("--offload-params", choices=tiers, default=tiers[0], help="where the parameters rest (default none)")
    add("--offload-gradients", choices=tiers, default=tiers[0], help="where gradients are summed (default none)")
    copies = "; copies take as long as gathers of as many bytes"
    add_time("--host-update-time", 0.8, "updating a unit in host memory", copies)
    state = "reading a unit's optimizer state from disks, and of writing it"
    add_time("--disk-time", 0.6, state, "; its parameters are a sixth of the bytes")
    share = "share of the activations that leaves the device until backward, up to 1 (default 0)"
    add("--offload-activations", type=float, default=0.0, metavar="SHARE", help=share)
    add_time("--copy-time", 0.2, "copying a unit's activations")


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
    for problem in _problems(args, parser):
        parser.error(problem)
    # These defaults follow from other flags. From here on args has them.
    args.schedule = args.schedule or ("interleaved" if (args.virtual_stages or 1) > 1 else "1f1b")
    args.virtual_stages = args.virtual_stages or CHUNKS[args.schedule] or 1
    args.zero_shard_size = args.zero_shard_size or args.dp
    vertical = VerticalOrder(args.vertical_group_size) if _is_vertical(args) else None
    groups = vertical.groups(args.micro_batches) if vertical is not None else None
    try:
        # In vertical order a group of micro-batches takes the place of one.
        micro_batches = args.micro_batches if groups is None else len(groups)
        schedule = make_schedule(args.schedule, args.pp, micro_batches, args.virtual_stages)
    except ValueError as error:
        parser.error(str(error))
    if args.forward_only:
        schedule = tuple(forward_only(stage) for stage in schedule)
    shapes, border = [schedule_shape(stage) for stage in schedule], ON_TIME
    if args.zero_stage is not None:
        shapes, options = _shapes(args), _step_options(args, vertical)
        border = options.border
        make = evaluation_step if args.forward_only else training_step
        stages = zip(schedule, shapes, strict=True)
        schedule = tuple(make(stage, shape, options, groups=groups) for stage, shape in stages)
    by_role = {(stage, 0): shape for stage, shape in enumerate(shapes)}
    lists = {(stage, 0): instructions for stage, instructions in enumerate(schedule)}
    check(lists, by_role, args.micro_batches, border=border)
    if args.list is not None:
        print("\n".join(f"{number:4d}  {instruction}" for number, instruction in enumerate(schedule[args.list])))
        return
    report = simulate(schedule, _times(args), shapes, border=border)
    print("\n".join(_title(args, groups, report)), end="\n\n")
    width = args.width or shutil.get_terminal_size((100, 24)).columns
    look = DrawOptions(width, wants_colour(args.color), args.fit, lanes=args.zero_stage is not None)
    print(draw(report, look))


def _title(args: argparse.Namespace, groups: Sequence[object] | None, report: SimulationReport) -> Iterator[str]:
    """The lines above the picture: what is drawn, and its bubble."""
    chunks = f", {args.virtual_stages} chunks each" if args.virtual_stages > 1 else ""
    zero = f", ZeRO-{args.zero_stage} on {args.dp} replicas" if args.zero_stage is not None else ""
    order = f" in {counted(len(groups), 'group')}, vertical" if groups is not None else ""
    micro_batches = counted(args.micro_batches, "micro-batch", "micro-batches")
    yield f"{args.schedule}: {counted(args.pp, 'stage')}{chunks}, {micro_batches}{order}{zero}"
    if (most := args.vertical_group_size or 0) > args.micro_batches:
        yield f"--vertical-group-size {most} is above --micro-batches {args.micro_batches}: all of them are one group"
    bubble = f"{report.bubble:.2%}"
    if report.longest < report.makespan * (1 - 1e-9):  # times are sums of floats, which differ in their last digits
        bubble += f" ({report.own_bubble:.2%} where stages need not wait for each other between steps)"
    yield f"bubble {bubble}; {report.makespan:g} units of time for {max(report.busy):g} of work"


def _is_vertical(args: argparse.Namespace) -> bool:
    """By the flag, else as in a run: where parameters rest on disks."""
    if args.micro_batch_order is None:
        return _tiers(args)[1].in_files
    return bool(args.micro_batch_order == "vertical")


def _problems(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What is wrong with the flags, in the order of what each check needs to be right already."""
    profile = args.profile or []
    work, messages = (args.forward_time, args.backward_time, *profile[:3]), (args.message_time, *profile[3:])
    messages += (args.gather_time, args.update_time, args.host_update_time, args.disk_time, args.copy_time)
    if not (all(0 < time < math.inf for time in work) and all(0 <= time < math.inf for time in messages)):
        yield "times of work are above 0, those of messages at least 0, and all of them are finite"
    if args.weight_time is not None and not 0 < args.weight_time < args.backward_time:
        yield f"--weight-time {args.weight_time:g} is a part of --backward-time {args.backward_time:g}"
    yield from not_positive(args, *COUNTS)
    if args.list is not None and not 0 <= args.list < args.pp:
        yield f"--list {args.list}: the stages are 0 to {args.pp - 1}"
    for field, stage in LEAST_STAGE.items():
        value = getattr(args, field)
        if value != parser.get_default(field) and (args.zero_stage is None or args.zero_stage < stage):
            typed = flag_of(field) if value is True else f"{flag_of(field)} {value}"
            yield f"{typed} goes with --zero-stage" + f" {stage}" * (stage > 0)
    if args.vertical_group_size is not None and not _is_vertical(args):
        yield f"--vertical-group-size {args.vertical_group_size} goes with --micro-batch-order vertical"
    optimizer, _, gradients = _tiers(args)
    on_device = optimizer is gradients is Tier.DEVICE
    if args.host_update_time != parser.get_default("host_update_time") and on_device:
        yield f"--host-update-time {args.host_update_time} goes with --offload-optimizer or --offload-gradients"
    if args.disk_time != parser.get_default("disk_time") and not any(tier.in_files for tier in _tiers(args)):
        yield f"--disk-time {args.disk_time} goes with nvme for --offload-optimizer, -params or -gradients"
    if not 0 <= args.offload_activations <= 1:
        yield f"--offload-activations {args.offload_activations:g}: is a share, 0 to 1"
    if args.early_update and not optimizer.goes_back:
        yield "--early-update goes with --offload-optimizer nvme"
    if args.early_update and args.late_update:
        yield "--early-update updates before the norm is known, and --late-update behind the end: drop one of them"
    for field in ("offload_activations", "late_update", "early_update"):
        if getattr(args, field) and args.forward_only:
            yield f"{flag_of(field)} is for training, which --forward-only does not draw"
    if args.zero_shard_size is not None and (args.zero_shard_size < 1 or args.dp % args.zero_shard_size):
        yield f"--zero-shard-size {args.zero_shard_size} does not divide --dp {args.dp}"


def _step_options(args: argparse.Namespace, vertical: VerticalOrder | None) -> StepOptions:
    """How a step's list is made from a schedule, as a run with these flags would."""
    # A breadth-first schedule has few chunks with unreduced gradients at a time, so each is reduced once.
    shards_gradients = args.zero_stage >= 2 and not is_breadth_first(args.schedule, args.virtual_stages)
    return StepOptions(
        reduce_every=shards_gradients or args.offload_gradients != Tier.DEVICE.value,
        gathered_bytes=PARAMETER_BYTES * args.zero_shard_size * args.gathered_units,
        late=args.late_update,
        early=args.early_update,
        vertical=vertical,
        leaving=args.offload_activations,
    )


def _shapes(args: argparse.Namespace) -> list[RankShape]:
    """The model state of every stage. A unit has an element for each rank that shares its state, and its activations
    count as one byte.
    """
    shards = args.zero_shard_size
    chunks = chunk_map(args.schedule, args.pp, args.virtual_stages)
    blocks = (args.blocks,) * chunks.count
    model = ExampleModel(blocks, args.zero_stage, shards, args.dp // shards, shards, *_tiers(args))
    shapes = [model.shape(chunks.of(stage)) for stage in range(args.pp)]
    return [shape.keeping([[1] * len(units) for units in shape.units]) for shape in shapes]


def _tiers(args: argparse.Namespace) -> tuple[Tier, Tier, Tier]:
    """Where optimizer state and parameters rest, and gradients are summed."""
    return Tier(args.offload_optimizer), Tier(args.offload_params), Tier(args.offload_gradients)


def _times(args: argparse.Namespace) -> ChunkTimes:
    """The times of chunks, with --zero-stage also those of what happens to model state, and of copies."""
    if args.profile:
        times = profiled_times(args.pp, args.virtual_stages, *args.profile)
    else:
        work = args.forward_time, args.backward_time, args.message_time, args.weight_time
        times = uniform_times(args.pp * args.virtual_stages, *work)
    if args.zero_stage is None:
        return times
    elements = args.zero_shard_size  # of a unit, see `_shapes`
    per_byte = args.gather_time / (PARAMETER_BYTES * elements)
    lanes = dict.fromkeys((Lane.SHARDS, Lane.ACROSS, Lane.TO_HOST, Lane.TO_DEVICE), per_byte)
    if args.offload_activations:  # which are one byte a unit, see `_shapes`
        lanes |= dict.fromkeys((Lane.TO_HOST, Lane.TO_DEVICE), args.copy_time)
    lanes[Lane.HOST] = args.host_update_time / (GRADIENT_BYTES * elements)
    lanes |= dict.fromkeys((*READ_LANES, *WRITE_LANES), args.disk_time / (STATE_BYTES * elements))
    return replace(times, per_byte=lanes, update=args.update_time / (GRADIENT_BYTES * elements))
