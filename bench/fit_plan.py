"""Fit the constants of a kind of GPU (`plan.cluster.kernels.Constants`) to measured step times, and judge them on rows
that the fit has not seen.

    python -m bench.fit_plan [--reference ../shared/reference] [--seed 1] [--gpu a100-80gb] [--write docs/numbers]

The fit minimises the mean absolute logarithm of predicted over measured time on a half of the measured rows, by
Levenberg and Marquardt's method with reweighted residuals. It takes the closed form of a step (`closed_form`); errors
are of the simulated lists. Rows are read from the reference, which stays where it is.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.mpu.axes import Axes, axes_of
from megazero.pipeline.measured import MeasuredCase
from megazero.pipeline.stage_specs import chunks_of, stage_specs
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.hardware import Cluster, known_hardware
from megazero.plan.cluster.kernels import Constants
from megazero.plan.cluster.table_rows import run_of_row
from megazero.plan.cluster.unit_times import UnitTimer, unit_seconds
from megazero.plan.rank_state import has_nccl, micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Lane
from megazero.program.simulate import step_time
from megazero.program.traffic import traffic, updated_bytes

Floats = NDArray[np.float64]
ONE_NODE, MANY_NODES = "vtrain_single_node.csv", "vtrain_multi_node.csv"
BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "products": (0.7, 0.99),
        "bandwidth": (0.6, 0.92),
        "misaligned": (1.0, 4.0),
        "launch": (5e-6, 9e-5),
        "hiding": (1.5, 8.0),
        "straggling": (0.0, 0.3),
        "latency": (5e-6, 2e-4),
        "inside": (0.5, 0.8),
        "between": (0.4, 1.0),
        "strided": (0.05, 1.0),
        "blocking": (0.0, 1.0),
        "update": (27.9, 28.1),
    }
)
"""What each constant may be: the sheet's numbers are never exceeded."""
START = Constants(0.87, 0.85, 2.0, 4.5e-5, 4.0, 0.07, 7e-5, 0.65, 0.9, 0.2, 0.3, 28.0)


@dataclass(frozen=True)
class MeasuredRow:
    """A row and its run. seconds: measured, of a step."""

    table: str
    row: Mapping[str, str]
    run: Run
    axes: Axes
    cluster: Cluster
    seconds: float

    @property
    def model(self) -> str:
        """Rows of one model have one name."""
        model = self.run.model
        return f"{self.table.removesuffix('.csv')} h {model.hidden_size} L {model.num_layers}"

    def on(self, constants: Constants) -> MeasuredRow:
        device = replace(self.cluster.device, constants=MappingProxyType(asdict(constants)))
        return replace(self, cluster=replace(self.cluster, device=device))


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
                rows.append(MeasuredRow(table, row, run, axes_of(run, said.gpus), cluster, float(seconds)))
    return rows


def predicted(row: MeasuredRow) -> float:
    """The seconds of a step, in the simulation of its lists."""
    times = ClusterRates(row.cluster).times(row.run, row.axes, "cuda")
    lists = StageLists(row.run, row.axes, nccl=has_nccl(row.run.parallel, row.axes))
    stages = [lists.of(stage) for stage in range(row.axes.pp)]
    shapes = [stage.shape for stage in stages]
    return step_time([stage.instructions for stage in stages], times, shapes, stages[0].border, 1)


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
        rates, axes = ClusterRates(cluster), work.row.axes
        node = replace(cluster, gpus=min(cluster.gpus, cluster.nodes_of))

        def unit(case: MeasuredCase, node: Cluster = node) -> float:
            key = id(case), node
            if key not in known:
                known[key] = sum(unit_seconds(case, node))
            return known[key]

        message = rates.message(axes, work.hidden)
        ends, virtual = axes.pp - 1, work.row.run.parallel.virtual_stages
        stages = [
            sum(map(unit, cases)) + 2 * virtual * rates.blocked(message) * ((stage > 0) + (stage < ends))
            for stage, cases in enumerate(work.stages)
        ]
        lanes = rates.lanes(axes)
        behind = work.sent * lanes.per_byte[Lane.SHARDS] + lanes.latency * work.messages * (axes.dp > 1)
        through = sum(stages) + 2 * (axes.pp - 1) * (message - rates.blocked(message))
        slowest = max(stages)
        seconds[number] = (
            work.micro_batches * slowest + (through - slowest) / virtual + behind + work.updated * rates.update
        )
    return seconds


def fitted(works: Sequence[RowWork], weights: Floats, start: Constants = START, rounds: int = 25) -> Constants:
    """The constants of the least weighted mean absolute logarithm of predicted over measured seconds."""
    names = list(BOUNDS)
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    measured = np.array([work.row.seconds for work in works])

    def off(values: Floats) -> Floats:
        return np.log(closed_form(works, Constants(*values)) / measured)

    values, damping = np.array(list(asdict(start).values())), 1e-2
    errors = off(values)
    for _ in range(rounds):
        # residuals are weighted by 1/|residual|, so that the sum of squares is that of absolute values
        square = weights / np.maximum(np.abs(errors), 0.01)
        step = 1e-3 * (high - low)
        columns = [
            (off(values + step * (index == np.arange(len(names)))) - errors) / step[index]
            for index in range(len(names))
        ]
        slope = np.stack(columns, 1) * (high - low)
        normal, side = slope.T @ (square[:, None] * slope), slope.T @ (square * errors)
        for _ in range(8):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), side)
            tried = np.clip(values - change * (high - low), low, high)
            better = off(tried)
            if (weights * np.abs(better)).sum() < (weights * np.abs(errors)).sum():
                values, errors, damping = tried, better, damping / 3
                break
            damping *= 4
        else:
            break
    return Constants(*values.tolist())
