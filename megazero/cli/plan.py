"""`megazero plan`: the best layouts of a run on a cluster that need not exist here, and what they take."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megazero.cli.exit_status import status_of
from megazero.cli.parser import Parser, command_parser, flag_of, given_path
from megazero.cli.shared_flags import model_of
from megazero.config.source import ConfigError
from megazero.system.collector import last_work
from megazero.system.status import FAILED, MISTAKEN

if TYPE_CHECKING:
    from megazero.calibrate.effort import Effort
    from megazero.config.flags import CommandOptions
    from megazero.config.parse import ParsedArguments
    from megazero.plan.cluster.candidates import OpenRun
    from megazero.plan.cluster.hardware import Cluster
    from megazero.plan.cluster.layout_search import BestLayouts
    from megazero.report.plan_text import Costs

DESCRIPTION = """
What fits on a cluster, how long a step takes, and which layout is fastest, without the cluster.

The search goes over tensor-parallel and pipeline-parallel ranks, schedule and virtual stages, micro-batch, recompute,
sequence parallelism, ZeRO and its shards, and offload where nothing fits without. Any flag of `megazero pretrain`
fixes what it says. Status 0: something fits. 1: nothing does, and the message says what to change. 2: a mistake.
"""
EXAMPLES = (
    "megazero plan --preset bloom-176b --gpus 384 --gpu a100-80gb",
    "megazero plan --preset llama3-70b --gpus 64 --gpu h100 --tp 8 --seq-length 8192 --json",
    "megazero plan --preset bloom-7b1 --gpus 8 --gpu a100-40gb --report plan.html",
    "python tools/plan.py --preset bloom-7b1 --gpus 8 --gpu a100-40gb --emit-flags",
    "megazero plan --predict measured.csv --json",
    "megazero plan --calibrate here.yaml",
)


SEARCHED = "gpus gpu nodes_of interconnect program tokens price report measured emit_flags".split()
"""The fields of flags that are of a search."""
NOT_OF_CALIBRATION = (
    "nodes_of interconnect program hardware tokens price predict json report measured emit_flags".split()
)
"""The fields of flags that a calibration has no use for."""


def arguments() -> Parser:
    parser = command_parser("plan", DESCRIPTION, EXAMPLES, "All flags of `megazero pretrain` are understood, too.")
    from megazero.plan.cluster.programs import PROGRAMS

    parser.allow_abbrev = False
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="number of devices, which is the number of ranks")
    add("--gpu", metavar="NAME", help="kind of device: a100-80gb, h100, ... (a wrong name lists all)")
    add("--nodes-of", type=int, metavar="N", help="devices of a node (default 8)")
    add("--interconnect", metavar="LINKS", help="links of a node to others, as 8xhdr or 4xeth100 (default: the GPU's)")
    add("--hardware", metavar="FILE.yaml", help="more devices and links, in the form of plan/cluster/hardware.yaml")
    add("--program", choices=PROGRAMS, help="whose step is predicted: megazero's (default), or what another takes")
    add("--tokens", type=float, metavar="N", help="tokens of the whole training (default: of the run's length)")
    add("--price", type=float, metavar="X", help="price of a device and hour")
    add("--predict", type=given_path, metavar="FILE.csv", help="predict each row of a table of runs, a JSON line each")
    add(
        "--calibrate",
        type=given_path,
        metavar="FILE.yaml",
        help="measure this machine, and write a file of --hardware; a run that has it predicts its step in the banner",
    )
    add("--json", action="store_true", help="print JSON")
    add("--report", type=given_path, metavar="FILE.html", help="write a page with the search, the memory and the step")
    add("--measured", type=given_path, metavar="FILE", help="with --report: metrics of a run of the first layout")
    add(
        "--emit-flags",
        nargs="?",
        const="-",
        metavar="FILE.yaml",
        help="print the first layout's command line alone, or write a file that --config reads",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    args, run_flags = arguments().parse_known_args(argv)
    if args.calibrate is not None:
        return calibrated(args, run_flags)
    if args.predict is not None:
        return status_of(lambda: _predict(args, run_flags), (ConfigError,))
    with last_work():
        return _searched(args, run_flags)


def _searched(args: Namespace, run_flags: Sequence[str]) -> int:
    """Plan, and return the status."""
    try:
        asked = asked_of(args, run_flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return MISTAKEN
    from megazero.report.metrics_lines import UnreadableRun

    return status_of(lambda: _plan(args, run_flags, asked), (ConfigError, UnreadableRun, FileExistsError))


def calibrated(args: Namespace, run_flags: Sequence[str], effort: Effort | None = None) -> int:
    """Measure this machine, write its entry, and return the status. effort: how much is measured; None: all."""
    from megazero.calibrate.calibration import DEFAULT_NAME, calibrate, effort_here, require_calibration
    from megazero.calibrate.ranks import NotMeasured

    name = (args.gpu or DEFAULT_NAME).lower()

    def work() -> None:
        given = [flag for flag in NOT_OF_CALIBRATION if getattr(args, flag) not in (None, False)]
        if words := [*map(flag_of, given), *run_flags]:
            raise ConfigError([f"{' '.join(words)}: --calibrate takes --gpu NAME, of its entry, and --gpus N alone"])
        require_calibration(args.calibrate, name, args.gpus)
        much = effort_here(args.gpus) if effort is None else effort
        calibrate(args.calibrate, name, much, lambda line: print(line, flush=True))
        print(f"{args.calibrate}: megazero plan --hardware {args.calibrate} --gpu {name} --gpus N ...")

    return status_of(work, (ConfigError, ValueError, FileExistsError), failures=(NotMeasured,))


class PlanRequest(NamedTuple):
    """The run and the cluster of a command line, what is asked of a training, and the ramp of its global batch."""

    run: OpenRun
    costs: Costs
    ramp: tuple[int, ...] | None


def _predict(args: Namespace, run_flags: Sequence[str]) -> None:
    from megazero.plan.cluster.hardware import known_hardware
    from megazero.plan.cluster.predict import predictions

    ignored = [flag for flag in SEARCHED if getattr(args, flag) is not None]
    words = [*(flag_of(flag) for flag in ignored), *run_flags]
    if words:
        raise ConfigError([f"{' '.join(words)}: --predict takes runs from its table alone"])
    for prediction in predictions(args.predict, known_hardware(args.hardware)):
        print(json.dumps(prediction), flush=True)


def asked_of(args: Namespace, run_flags: Sequence[str]) -> PlanRequest:
    """What a command line asks. Raises ConfigError with everything that is wrong."""
    problems, cluster, parsed = list[str](), None, None
    try:
        cluster = _cluster(args)
    except ConfigError as error:
        problems += error.problems
    for flag, value in (("--tokens", args.tokens), ("--price", args.price)):
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{flag} {value:g}: must be a finite number above 0")
    if args.json and args.emit_flags is not None:
        problems.append("--json and --emit-flags print different things: give one of them")
    if args.measured is not None and args.report is None:
        problems.append(f"--measured {args.measured}: goes with --report FILE.html, whose page shows it")
    if misspelled := [*_misspelled(run_flags)]:
        raise ConfigError([*problems, *misspelled])
    try:
        parsed = _parsed(run_flags, "cuda" if cluster is None else cluster.device.kind)
    except ConfigError as error:
        problems += error.problems
    if parsed is not None:
        problems += _of_a_start(parsed.command, args.gpus)
        if parsed.run.model.vocab_size is None:
            problems.append("--vocab-size: is missing; a plan reads no tokenizer")
        if "global_batch_size" not in parsed.explicit:
            problems.append("--global-batch-size: is missing; a plan is for one step of this many samples")
        precision = parsed.run.optimizer.precision
        if cluster is not None and precision not in cluster.device.flops:
            known = ", ".join(cluster.device.flops)
            problems.append(f"--precision {precision}: {cluster.device.name} computes in {known}")
        if cluster is not None and parsed.run.parallel.device != cluster.device.kind:
            problems.append(f"--device {parsed.run.parallel.device}: {cluster.device.name} is a device of another kind")
    if problems or parsed is None or cluster is None:
        raise ConfigError(problems)
    from megazero.plan.cluster.candidates import OpenRun
    from megazero.plan.cluster.programs import OURS, PROGRAMS
    from megazero.report.plan_text import Costs

    costs = Costs(_tokens(args, parsed), args.price)
    if costs.price is not None and costs.tokens is None:
        raise ConfigError([f"--price {args.price:g}: goes with --tokens N, or with the length of the run"])
    fixed = parsed.explicit | ({"nodes_of"} if args.nodes_of is not None else set())
    program = OURS if args.program is None else PROGRAMS[args.program]
    return PlanRequest(OpenRun.of(parsed.run, cluster, fixed, program), costs, parsed.run.schedule.rampup_batch_size)


def _of_a_start(command: CommandOptions, gpus: int | None) -> Iterator[str]:
    """What says how a run starts, and nothing of a plan. The ranks may be the plan's."""
    for name in ("validate_only", "print_config", "skip_files"):
        if getattr(command, name):
            yield f"{flag_of(name)}: says how a run starts, and a plan starts none"
    for name in ("ranks", "world_size"):
        number = getattr(command, name)
        if number is not None and number != gpus:
            yield f"{flag_of(name)} {number}: a plan is for the ranks of --gpus, {gpus}"


def _misspelled(run_flags: Sequence[str]) -> Iterator[str]:
    """What is no flag, and more like one of a plan than like one of a run."""
    from megazero.config.flags import known_flags
    from megazero.config.options import did_you_mean

    own = {flag for flag in arguments()._option_string_actions if flag.startswith("--")}
    of_runs = known_flags()
    for flag in (word.partition("=")[0] for word in run_flags if word.startswith("--")):
        hint = "" if flag in of_runs else did_you_mean(flag, [*own, *of_runs])
        if any(f" {name}?" in hint for name in own - of_runs):
            yield f"{flag}: there is no {flag}{hint}"


def _cluster(args: Namespace) -> Cluster:
    from megazero.plan.cluster.hardware import known_hardware

    missing = [f"{flag}: is missing" for flag, value in (("--gpus", args.gpus), ("--gpu", args.gpu)) if value is None]
    if missing:
        raise ConfigError(missing)
    return known_hardware(args.hardware).cluster(args.gpu, args.gpus, args.nodes_of, args.interconnect)


def _parsed(run_flags: Sequence[str], kind: str) -> ParsedArguments:
    from megazero.config.parse import ProgramSettings, parse_arguments
    from megazero.config.source import ConfigSource

    # an open micro-batch is searched for, and its default is no reason to refuse a global batch
    open_settings = ConfigSource("a plan", {"micro_batch_size": 1, "device": kind})
    program = ProgramSettings(ConfigSource("a plan"), has_data=False, defaults=open_settings, whole_batches=True)
    return parse_arguments(run_flags, None, model_of, program=program)


def _tokens(args: Namespace, parsed: ParsedArguments) -> float | None:
    schedule, length = parsed.run.schedule, parsed.run.model.seq_length
    if args.tokens is not None or "train_length" not in parsed.explicit:
        tokens: float | None = args.tokens
        return tokens
    if schedule.train_samples is not None:
        return float(schedule.train_samples) * length
    return None if schedule.train_iters is None else float(schedule.train_iters) * schedule.global_batch_size * length


def _plan(args: Namespace, run_flags: Sequence[str], asked: PlanRequest) -> int:
    from megazero.plan.cluster.layout_flags import layout_flags, ramp_flags, with_ramp
    from megazero.plan.cluster.layout_search import LayoutSearch
    from megazero.report.plan_text import plan_json, plan_text

    _look_at_files(args)
    layouts = LayoutSearch(asked.run).run()
    if not layouts.steps:
        return _refuse(args, asked.run, layouts)
    best = layouts.steps[0]
    ramp = ramp_flags(best, asked.ramp)
    if args.report is not None:
        _write_page(args, asked, layouts)
    if args.emit_flags == "-":
        print(shlex.join([*run_flags, *layout_flags(best, asked.run.fixed).split(), *ramp.split()]))
    elif args.emit_flags is not None:
        from megazero.config.dump import dump

        Path(args.emit_flags).write_text(dump(with_ramp(best, asked.ramp)))
        print(f"{args.emit_flags}: the first layout, for --config")
    elif args.json:
        print(json.dumps(plan_json(layouts, asked.costs), indent=2))
    else:
        print(plan_text(layouts, asked.costs))
        if ramp:
            print(f"\nThe ramp of the global batch does not fit this layout; nearest: {ramp}")
    return 0


def _look_at_files(args: Namespace) -> None:
    """Refuse files that cannot be read or may not be replaced, before a search, which may take minutes."""
    from megazero.config.dump import HEAD
    from megazero.report.page.document import require_place
    from megazero.report.run_folder import read_runs
    from megazero.system.writable import why_not_replaced

    if args.report is not None:
        require_place(args.report, "--report")
    if args.measured is not None:
        read_runs([args.measured])
    if args.emit_flags in (None, "-"):
        return
    file = Path(args.emit_flags)
    wrong = "names no file" if not args.emit_flags else why_not_replaced(file, HEAD, len(HEAD), "file of a run")
    if wrong is None and not file.parent.is_dir():
        wrong = "there is no such folder"
    if wrong is None and args.report is not None and file.resolve() == args.report.resolve():
        wrong = "is the page of --report, too"
    if wrong is not None:
        raise FileExistsError(f"--emit-flags {args.emit_flags}: {wrong}")


def _write_page(args: Namespace, asked: PlanRequest, layouts: BestLayouts) -> None:
    """Write the page of --report, and name it on standard error, beside whatever is printed."""
    from megazero.report.page.document import write_page
    from megazero.report.plan_report import plan_html

    write_page(args.report, "--report", plan_html(layouts, asked.costs, args.measured))
    print(args.report, file=sys.stderr)


def _refuse(args: Namespace, asked: OpenRun, layouts: BestLayouts) -> int:
    """Say what is short, and what fits."""
    from megazero.plan.cluster.misfit import cheapest_change, short_words

    change = cheapest_change(asked)
    advice = "no change of these flags fits, nor 64 times the devices" if change is None else change.words
    short = short_words(layouts, asked)
    if args.json:
        print(json.dumps({"best": [], "short": short, "change": None if change is None else change.words}))
    print(f"Nothing fits {asked.cluster}: {short}.\nFits: {advice}", file=sys.stderr)
    return FAILED
