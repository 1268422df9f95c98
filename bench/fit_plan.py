"""Fit the constants of a kind of GPU (`plan.cluster.kernels.Constants`) to measured step times, and judge them on rows
that the fit has not seen.

    python -m bench.fit_plan [--reference ../shared/reference] [--seed 1] [--judge] [--record docs/pictures/plan.json]

The fit minimises the mean absolute logarithm of predicted over measured time on a half of the measured rows, by
Levenberg and Marquardt's method with reweighted residuals. It takes the closed form of a step (`closed_form`); errors
are of the simulated lists. Rows are read from the reference, which stays where it is.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.mpu.axes import Axes, axes_of
from megazero.pipeline.measured import MeasuredCase
from megazero.pipeline.stage_specs import chunks_of, stage_specs
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.fit import Floats
from megazero.plan.cluster.fit import fitted as least_errors
from megazero.plan.cluster.hardware import Cluster, known_hardware
from megazero.plan.cluster.kernels import Constants, constants_of
from megazero.plan.cluster.programs import MEGATRON_LAUNCH, Program
from megazero.plan.cluster.table_rows import run_of_row
from megazero.plan.cluster.unit_times import UnitTimer, unit_seconds
from megazero.plan.rank_state import has_nccl, micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Lane
from megazero.program.simulate import step_time
from megazero.program.traffic import traffic, updated_bytes

ONE_NODE, MANY_NODES, PUBLISHED = "vtrain_single_node.csv", "vtrain_multi_node.csv", "published_runs.csv"
NAMES = ("vTrain, one node", "vTrain, many nodes", "published runs")
WEIGHT = 1.5
"""Of a row of many nodes in the fit, beside one of a node: there are sixteen times as many of those."""
STEPS = 2
"""Steps that are simulated, so that what a step leaves to the next one is counted."""
BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "products": (0.7, 0.89),
        "bandwidth": (0.6, 0.85),
        "misaligned": (1.0, 4.0),
        "launch": (5e-6, 9e-5),
        "hiding": (1.5, 8.0),
        "straggling": (0.0, 0.3),
        "latency": (5e-6, 2e-4),
        "inside": (0.5, 0.8),
        "between": (0.4, 1.0),
        "strided": (0.13, 1.0),
        "update": (28.0, 28.01),
    }
)
"""What each constant may be; `launch` is of the programs of the rows (`plan.cluster.programs`), the others are of the
device. No share exceeds what is published of the best kernels and collectives: 0.89 of 312 TFLOP/s and 0.8 of 300 GB/s.
Adam moves 28 bytes for a parameter. Rows that no constant explains do not take a ninth of the links' rate from others.
"""
START = Constants(
    products=0.88,
    bandwidth=0.75,
    misaligned=3.0,
    launch=1.36e-5,
    hiding=7.0,
    straggling=0.027,
    latency=1.2e-4,
    inside=0.79,
    between=0.98,
    strided=0.131,
    blocking=1.0,
    update=28.0,
)
"""Where the fit starts. No row is of a program that reads `blocking`: all of them wait for their messages."""


@dataclass(frozen=True)
class MeasuredRow:
    """A row and its run. seconds: measured, of a step; program: whose run it is."""

    table: str
    row: Mapping[str, str]
    run: Run
    axes: Axes
    cluster: Cluster
    seconds: float
    program: Program

    @property
    def model(self) -> str:
        """Rows of one model have one name."""
        model = self.run.model
        return f"{self.table.removesuffix('.csv')} h {model.hidden_size} L {model.num_layers}"

    def on(self, constants: Constants) -> MeasuredRow:
        """The row on devices with these constants, if they are of the kind of GPU that is fitted."""
        if not self.cluster.device.name.startswith("a100"):
            return self
        device = self.cluster.device
        device = replace(device, constants=MappingProxyType({**device.constants, **asdict(constants)}))
        program = replace(self.program, launch=constants.launch)
        return replace(self, cluster=replace(self.cluster, device=device), program=program)

    @property
    def fits(self) -> bool:
        return ClusterStep(self.run, self.cluster, self.program).fits


def measured_rows(folder: Path, table: str) -> list[MeasuredRow]:
    """The rows of a table whose step was measured."""
    hardware, rows = known_hardware(), list[MeasuredRow]()
    with (folder / table).open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            seconds = row.get("seconds_per_iteration") or str(float(row.get("iteration_time_ms") or 0) / 1e3)
            if not float(seconds):
                continue
            said = run_of_row(row)
            cluster = hardware.cluster(said.gpu, said.gpus, said.nodes_of, said.interconnect)
            for words in said.choices:
                run = parse_run(words, said.gpus, lambda path: ConfigSource(path, unread=True))
                rows.append(
                    MeasuredRow(table, row, run, axes_of(run, said.gpus), cluster, float(seconds), said.program)
                )
    return rows


def predicted(row: MeasuredRow) -> float:
    """The seconds of a step, in the simulation of its lists."""
    times = ClusterRates(row.cluster, row.program).times(row.run, row.axes, "cuda")
    lists = StageLists(row.run, row.axes, nccl=has_nccl(row.run.parallel, row.axes))
    stages = [lists.of(stage) for stage in range(row.axes.pp)]
    shapes = [stage.shape for stage in stages]
    return step_time([stage.instructions for stage in stages], times, shapes, stages[0].border, STEPS)


@dataclass(frozen=True)
class RowWork:
    """What a fit reads of a row.

    stages   of each stage the cases of its units
    moved    bytes on the lane of shards, and of gradients that an update uses, of the rank with most
    """

    row: MeasuredRow
    stages: tuple[tuple[MeasuredCase, ...], ...]
    micro_batches: int
    hidden: int
    sent: float
    messages: int
    updated: float


def works_of(rows: Iterable[MeasuredRow]) -> list[RowWork]:
    """Of each row; equal units of all rows are one value."""
    same = dict[MeasuredCase, MeasuredCase]()
    works = map(work_of, rows)
    return [
        replace(work, stages=tuple(tuple(same.setdefault(case, case) for case in cases) for cases in work.stages))
        for work in works
    ]


def work_of(row: MeasuredRow) -> RowWork:
    plan = activation_plan(row.run, "cuda")
    timer, table = UnitTimer(row.cluster, row.run, plan), recompute_table(row.run, row.axes, "cuda")
    chunks, specs = chunks_of(row.run), stage_specs(row.run)
    stages = tuple(
        tuple(case for chunk in chunks.of(stage) for case in timer.cases(specs[chunk], table))
        for stage in range(row.axes.pp)
    )
    lists = StageLists(row.run, row.axes, nccl=True)
    first = lists.of(0)
    sent = traffic(first.instructions, first.shape)
    updated = sum(updated_bytes(first.shape, number, -1) for number in range(len(first.shape.buckets)))
    buckets = len(first.shape.buckets)
    micro_batches = micro_batches_of(row.run, row.axes)
    return RowWork(row, stages, micro_batches, plan.hidden_bytes, sent.get(Lane.SHARDS, 0), buckets, updated)


def closed_form(works: Sequence[RowWork], constants: Constants) -> Floats:
    """The seconds of each row: the slowest stage's micro-batches one after the other, one micro-batch through all other
    stages and back, and behind these the reduction and the update of the first stage.
    """
    seconds = np.empty(len(works))
    devices = {id(work.row.cluster.device): work.row.cluster.device for work in works}
    made = {key: replace(device, constants=MappingProxyType(asdict(constants))) for key, device in devices.items()}
    known = dict[tuple[int, Cluster], float]()
    for number, work in enumerate(works):
        cluster = replace(work.row.cluster, device=made[id(work.row.cluster.device)])
        rates, axes = ClusterRates(cluster, work.row.program), work.row.axes
        node = replace(cluster, gpus=min(cluster.gpus, cluster.nodes_of))

        def unit(case: MeasuredCase, node: Cluster = node) -> float:
            key = id(case), node
            if key not in known:
                known[key] = sum(unit_seconds(case, node))
            return known[key]

        message = rates.message(work.row.run, axes, work.hidden)
        ends, virtual = axes.pp - 1, work.row.run.parallel.virtual_stages
        stages = [
            sum(map(unit, cases)) + 2 * virtual * rates.blocked(message) * ((stage > 0) + (stage < ends))
            for stage, cases in enumerate(work.stages)
        ]
        stages[-1] += sum(rates.loss(work.row.run))  # the head is there in every order of chunks but zb-v's
        lanes = rates.lanes(axes)
        behind = work.sent * lanes.per_byte[Lane.SHARDS] + lanes.latency * work.messages * (axes.dp > 1)
        through = sum(stages) + 2 * (axes.pp - 1) * (message - rates.blocked(message))
        slowest = max(stages)
        seconds[number] = (
            work.micro_batches * slowest + (through - slowest) / virtual + behind + work.updated * rates.update
        )
    return seconds


def kept_constants() -> Constants:
    """Those that an earlier fit has left in the file of hardware and, of programs, beside these."""
    return replace(constants_of(known_hardware().device("a100-80gb")), launch=MEGATRON_LAUNCH)


def fitted(works: Sequence[RowWork], weights: Floats, start: Constants = START, rounds: int = 25) -> Constants:
    """The constants of the least weighted mean absolute logarithm of predicted over measured seconds."""
    names = list(BOUNDS)
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    measured = np.array([work.row.seconds for work in works])

    def made(values: Floats) -> Constants:
        return replace(start, **dict(zip(names, values.tolist(), strict=True)))

    def off(values: Floats) -> Floats:
        return np.log(closed_form(works, made(values)) / measured)

    first = np.array([asdict(start)[name] for name in names])
    values = least_errors(off, first, (low, high), weights, rounds)
    return made(values)


@dataclass(frozen=True)
class Judged:
    """A row that the fit has not seen. predicted: seconds, in the simulation."""

    row: MeasuredRow
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.seconds - 1


def judged(rows: Iterable[MeasuredRow], constants: Constants) -> list[Judged]:
    """Of each row the fastest of the runs that it may be of, and that fit."""
    choices = dict[tuple[str, str], list[MeasuredRow]]()
    for row in rows:
        choices.setdefault((row.table, str(row.row)), []).append(row.on(constants))
    fitting = (runs if len(runs) == 1 else [row for row in runs if row.fits] for runs in choices.values())
    return [min((Judged(row, predicted(row)) for row in runs), key=lambda seen: seen.predicted) for runs in fitting]


def rank_correlation(seen: Sequence[Judged]) -> float:
    """Spearman's, of measured and predicted seconds."""
    places = [np.argsort(np.argsort(of)) for of in ([s.row.seconds for s in seen], [s.predicted for s in seen])]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def chosen(seen: Sequence[Judged]) -> list[float]:
    """For each model and number of GPUs by how much longer a sample takes in the layout that is predicted to be the
    fastest than in the fastest that was measured.
    """
    groups = dict[tuple[str, int], list[Judged]]()
    for each in seen:
        groups.setdefault((each.row.model, each.row.cluster.gpus), []).append(each)
    lost = list[float]()
    for group in groups.values():
        if len(group) > 1:
            samples = [each.row.run.schedule.global_batch_size for each in group]
            measured = [each.row.seconds / size for each, size in zip(group, samples, strict=True)]
            least = min(range(len(group)), key=lambda at: group[at].predicted / samples[at])
            lost.append(measured[least] / min(measured) - 1)
    return lost


def mean_error(seen: Sequence[Judged]) -> float:
    return sum(abs(each.error) for each in seen) / len(seen)


def halves(rows: Sequence[MeasuredRow], seed: int) -> tuple[list[MeasuredRow], list[MeasuredRow]]:
    """A random half to fit, and the rest."""
    order = np.random.default_rng(seed).permutation(len(rows))
    cut = len(rows) // 2
    return [rows[at] for at in sorted(order[:cut])], [rows[at] for at in sorted(order[cut:])]


def report(one: Sequence[Judged], many: Sequence[Judged], published: Sequence[Judged]) -> Iterator[str]:
    """Lines of a page."""
    yield "| rows | number | mean error | rank correlation by model |"
    yield "|---|---|---|---|"
    for name, seen in (("one node", one), ("many nodes", many)):
        models = sorted({each.row.model for each in seen})
        ranks = [rank_correlation([each for each in seen if each.row.model == model]) for model in models]
        yield f"| {name} | {len(seen)} | {mean_error(seen):.1%} | {', '.join(f'{rank:.3f}' for rank in ranks)} |"
    lost = chosen([*one, *many])
    near = sum(each <= 0.03 for each in lost)
    yield ""
    yield f"Chosen layouts within 3% of the best measured: {near} of {len(lost)}."
    yield ""
    yield "| run | measured s | predicted s | error |"
    yield "|---|---|---|---|"
    for each in published:
        run, axes = each.row.run, each.row.axes
        name = (
            f"{each.row.row['source'].split(',')[0]}, {each.row.row['model']}: tp {axes.tp}, pp {axes.pp}, dp {axes.dp}"
        )
        name += f", recompute {run.parallel.recompute_granularity}, micro-batch {run.schedule.micro_batch_size}"
        yield f"| {name} | {each.row.seconds:.2f} | {each.predicted:.2f} | {each.error:+.1%} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=Path("../shared/reference"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", action="store_true", help="fit nothing: judge the constants of the file on all rows")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write errors by measured seconds, too")
    args = parser.parse_args(argv)
    one, many = (measured_rows(args.reference, table) for table in (ONE_NODE, MANY_NODES))
    published = measured_rows(args.reference, PUBLISHED)
    if args.judge:
        constants = kept_constants()
    else:
        (fit_one, one), (fit_many, many) = halves(one, args.seed), halves(many, args.seed)
        works = works_of([*fit_one, *fit_many])
        weights = np.array([1.0] * len(fit_one) + [WEIGHT] * len(fit_many))
        constants = fitted(works, weights)
    for name in BOUNDS:
        print(f"      {name}: [{getattr(constants, name):.4g}, fit]")
    seen = {name: judged(rows, constants) for name, rows in zip(NAMES, (one, many, published), strict=True)}
    print(*report(*seen.values()), sep="\n")
    if args.record is not None:
        points = {
            name: [(float(f"{e.row.seconds:.2g}"), round(e.error, 3)) for e in group] for name, group in seen.items()
        }
        args.record.write_text(json.dumps(points) + "\n")


if __name__ == "__main__":
    main()
