"""--placement auto against static placements: seconds of a step in turns, and the bytes of auto in every tier.

    python -m bench.placement --folder /mnt/nvme          # auto under 40, 60 and 80 % of what all on the device takes
    python -m bench.placement --percent 60 --rounds 8     # one budget, for longer
    python -m bench.placement --no-disks                  # placements without disks
    python -m bench.placement --quick                     # a tiny model: does it start?

Few tokens pass a wide model, so that what a placement moves is a large part of a step. A budget's contestants are auto
and the static placements whose plan keeps to that budget. All are processes that stay alive and take turns
(`bench.harness`), in another order each round. The first step of a turn does not count: it ends what the turn before
has begun. Results are written after each budget. Status 1 if auto misses one.

of the best  the median over the rounds of (seconds of a step / those of the static placement with the least median)
simulated    seconds in the simulation, at the rates that auto has measured. It is what auto believes
off          the measured seconds over the simulated ones. Where rows differ here, rates or simulation are wrong, and
             a good choice of auto is luck
device, host MiB by the plan. Those of auto are also taken: all that torch's allocator holds in a step (but for what
             rests in host memory), and what the run has allocated there, in a run apart that is not timed
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.contestants.megazero_ import flags_of
from bench.entries import megazero
from bench.harness import Contestant
from bench.script import parser_of, report, say
from bench.workload import Workload
from megazero.config.parse import parse_run
from megazero.config.placement import applied, as_flags
from megazero.mpu.axes import axes_of
from megazero.plan.placed_step import Cluster, Machine, PlacedStep
from megazero.plan.step_times import MachineRates
from megazero.system import device as devices

Settings = Mapping[str, Any]
STATIC: tuple[Settings, ...] = (
    {"offload_optimizer": "cpu:0.4"},
    {"offload_optimizer": "cpu:0.7"},
    {"offload_optimizer": "cpu:0.9"},
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu", "late_update": True},
    {"offload_optimizer": "cpu", "offload_activations": "cpu"},
    {"offload_optimizer": "cpu", "offload_gradients": "cpu"},
    {"offload_optimizer": "cpu", "offload_params": "cpu"},
    {"offload_optimizer": "nvme:0.4", "late_update": True},
    {"offload_optimizer": "nvme:0.7", "late_update": True},
    {"offload_optimizer": "nvme", "late_update": True},
)
"""What a user would try by hand."""
AUTO = "auto"
LIMIT = 1.02
"""The most that auto may take of the best static placement's time: runs of one command line differ by as much."""
MODEL = Workload("placement", layers=6, hidden=768, heads=12, sequence=128, micro_batch=1, micro_batches=4)
TINY = replace(MODEL, layers=2, hidden=64, heads=2, sequence=16, vocabulary=256, micro_batches=2, threads=1)
MIB = 2**20
SOME_RATES = MachineRates(1.0, 1.0, 1.0, 1.0, 1.0)
"""Bytes do not depend on them."""


@dataclass
class Budget:
    """What was found under a budget.

    limits   most bytes on the device, and in host memory
    settings of each contestant, and its seconds of a step: by round its median
    rates    that auto has measured, and `told`, what its banner says
    taken    bytes of auto by tier
    """

    limits: tuple[int, int]
    settings: dict[str, dict[str, Any]]
    seconds: dict[str, list[float]]
    rates: dict[str, float]
    told: list[str]
    taken: dict[str, int]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    @property
    def best(self) -> str:
        """The fastest static placement; auto where no static one keeps to the budget."""
        return min((name for name in self.seconds if name != AUTO), key=self.median, default=AUTO)

    def ratios(self, name: str) -> list[float]:
        """Of the best static one's seconds, by round."""
        return [own / best for own, best in zip(self.seconds[name], self.seconds[self.best], strict=True)]

    @property
    def is_kept(self) -> bool:
        """Whether what auto has allocated stays within both budgets."""
        return self.taken["device"] <= self.limits[0] and self.taken["host"] <= self.limits[1]

    @property
    def is_met(self) -> bool:
        return self.is_kept and statistics.median(self.ratios(AUTO)) <= LIMIT


@dataclass(frozen=True)
class Bench:
    """What contestants share. buffer: --nvme-buffer-bytes. folder: for swap files; None: no placement uses disks."""

    work: Workload
    buffer: int
    folder: Path | None

    def machine(self, rates: MachineRates) -> Machine:
        disks = () if self.folder is None else (str(self.folder),)
        shared = {"nvme_path": disks, "nvme_buffer_bytes": self.buffer}
        run = applied(parse_run(flags_of(self.work, Path("."), 1), 1), shared)
        return Machine(run, Cluster(axes_of(run, 1), devices.kind(self.work.device), nccl=False), rates)

    def statics(self) -> dict[str, Settings]:
        return {as_flags(each): each for each in STATIC if self.folder is not None or "nvme" not in str(each)}

    def flags(self, words: Sequence[str]) -> list[str]:
        """The flags of a placement with those of its disks and buffers, where it may use them."""
        disks = self.folder is not None and any(word.startswith("nvme") or word == AUTO for word in words)
        moves = any(word.startswith("--offload") or word == AUTO for word in words)
        return [
            *words,
            *(("--nvme-path", str(self.folder)) if disks else ()),
            *(("--nvme-buffer-bytes", str(self.buffer)) if moves else ()),
        ]

    @contextmanager
    def prepared(self, name: str, module: str, words: Sequence[str]) -> Iterator[Contestant]:
        """A contestant that has taken its first steps."""
        one = Contestant(self.work, replace(megazero(name, *self.flags(words)), module=module))
        try:
            one.prepare(2)
            yield one
        finally:
            one.stop()

    def taken(self, words: Sequence[str]) -> dict[str, int]:
        """The most bytes of each tier in a step, as allocated."""
        with self.prepared("metered", "megazero_meter", words) as one:
            one.steps(2)
            (report,) = one.ask("report")
        return dict(report["tiers"])


@dataclass(frozen=True)
class Length:
    rounds: int
    steps: int


def measure(bench: Bench, running: dict[str, Contestant], limits: tuple[int, int], length: Length) -> Budget:
    """Auto under a budget, in turns with the static placements that keep to it. running: those that are alive."""
    budgets = ("--device-memory-budget", str(limits[0]), "--host-memory-budget", str(limits[1]))
    machine = bench.machine(SOME_RATES)
    names = [name for name, own in bench.statics().items() if fits(machine.placed(own), limits)]
    with bench.prepared(AUTO, "megazero_placed", ("--placement", AUTO, *budgets)) as auto:
        (report,) = auto.ask("report")
        turns = {AUTO: auto, **{name: running[name] for name in names}}
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(length.rounds):
            for name in reversed(turns) if number % 2 else turns:
                seconds[name].append(statistics.median(turns[name].steps(1 + length.steps)[1:]))
            said = f"{AUTO} {seconds[AUTO][-1]:.3f} s"
            say(f"    round {number + 1}/{length.rounds}: {said}, others {min_of(seconds, names):.3f} s and more")
    settings = {AUTO: report["settings"], **{name: dict(bench.statics()[name]) for name in names}}
    flags = as_flags(report["settings"]).split()
    return Budget(limits, settings, seconds, report["rates"], report["told"], bench.taken([*flags, *budgets]))


def min_of(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    return min((seconds[name][-1] for name in names), default=0.0)


def fits(step: PlacedStep, limits: tuple[int, int]) -> bool:
    return step.device.nbytes <= limits[0] and step.host_bytes <= limits[1]


HEADS = ("placement", "seconds", "of the best", "simulated", "off", "device, MiB", "host, MiB")


def rows(found: Budget, machine: Machine) -> list[list[str]]:
    """The contestants of a budget, the fastest first."""
    told = []
    for name in sorted(found.seconds, key=found.median):
        step = machine.placed(found.settings[name])
        shown = f"auto: {as_flags(found.settings[name]) or 'all on the device'}" if name == AUTO else name
        numbers = found.median(name), statistics.median(found.ratios(name)), step.seconds
        cells = [f"{number:.3f}" for number in (*numbers, found.median(name) / step.seconds)]
        told.append([shown, *cells, f"{step.device.nbytes / MIB:,.0f}", f"{step.host_bytes / MIB:,.0f}"])
    return told


def verdict(percent: int, found: Budget, machine: Machine) -> str:
    """Whether auto has met its budget and the best static placement, and whether its simulation has said so before."""
    ratios, (device, host) = sorted(found.ratios(AUTO)), found.limits
    statics = {name: machine.placed(own).seconds for name, own in found.settings.items() if name != AUTO}
    expected = min(statics, key=statics.__getitem__, default=AUTO)
    believed = machine.placed(found.settings[AUTO]).seconds
    taken = found.taken
    words = (
        f"auto under {percent} %: {found.median(AUTO):.3f} s, the best static one ({found.best}) "
        f"{found.median(found.best):.3f} s: ratio {statistics.median(ratios):.3f} (rounds {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f}), at most {LIMIT}; device {taken['device'] / MIB:,.1f} of {device / MIB:,.1f} MiB, host "
        f"{taken['host'] / MIB:,.1f} of {host / MIB:,.1f} MiB: {'met' if found.is_met else 'MISSED'}"
    )
    if not statics:
        return f"{words}. No static one keeps to the budget"
    return (
        f"{words}. Simulated: auto {believed:.3f} s, the best static one {statics[expected]:.3f} s "
        f"({expected if expected != found.best else 'the same'})"
    )


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "a tiny model and one budget: a smoke test")
    for name in ("layers", "hidden", "sequence", "micro_batches", "threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(MODEL, name), help="%(default)s")
    parser.add_argument("--percent", type=int, nargs="+", default=[40, 60, 80], help="budgets: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="of a budget: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of a turn: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=Path("."), help="for swap files, on a disk")
    parser.add_argument("--no-disks", action="store_true", help="no placement uses disks")
    return parser.parse_args()


def bench_of(args: argparse.Namespace) -> Bench:
    names = ("layers", "hidden", "sequence", "micro_batches", "threads", "device")
    work = TINY if args.quick else replace(MODEL, **{name: getattr(args, name) for name in names})
    work = work if args.quick else replace(work, heads=max(1, args.hidden // 64))
    return Bench(work, 1_000_000 if args.quick else 64_000_000, None if args.no_disks else args.folder.resolve())


def main() -> None:
    args = arguments()
    bench, length = bench_of(args), Length(1, 1) if args.quick else Length(args.rounds, args.steps)
    percents = args.percent[-1:] if args.quick else args.percent
    machine, found, texts = bench.machine(SOME_RATES), dict[str, Budget](), list[str]()
    need, path = machine.placed({}).device.nbytes, None
    most = need * max(percents) // 100
    with ExitStack() as alive:
        running = {
            name: alive.enter_context(bench.prepared(name, "megazero_", name.split()))
            for name, own in bench.statics().items()
            if fits(machine.placed(own), (most, need))
        }
        for percent in percents:
            say(f"auto under {percent} % of {need:,} bytes")
            one = found[str(percent)] = measure(bench, running, (need * percent // 100, need), length)
            rated = bench.machine(MachineRates(**one.rates))
            texts.append(f"{verdict(percent, one, rated)}\n\n{results.table(HEADS, rows(one, rated))}")
            settings = {"workload": asdict(bench.work), "buffer": bench.buffer, **asdict(length), "limit": LIMIT}
            data = {"need": need, "budgets": {name: asdict(each) for name, each in found.items()}}
            path = report(args, "placement", settings, data, "\n\n".join(texts), path)
            print(texts[-1], path, sep="\n\n", end="\n\n", flush=True)
    # a tiny model's times say nothing, but its bytes do
    sys.exit(0 if all(one.is_kept if args.quick else one.is_met for one in found.values()) else 1)


if __name__ == "__main__":
    main()
