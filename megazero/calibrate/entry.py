"""From what the ranks have measured to an entry of a file of hardware: rates as they are, and constants that are fitted
to the seconds of whole steps, by the same arithmetic that predicts steps afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np

from megazero.calibrate.effort import RankMeasurements
from megazero.calibrate.runs import run_of
from megazero.config.schema import Run
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.cluster_times import GRADIENT
from megazero.plan.cluster.fit import Floats, fitted
from megazero.plan.cluster.hardware import Cluster, Device, Link
from megazero.plan.cluster.kernels import Constants

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "attention": (0.2, 1.0),
        "bandwidth": (0.02, 4.0),
        "launch": (5e-7, 1e-3),
        "thin": (0.2, 1.3),
    }
)
"""What each constant may be that is fitted to steps. Kernels whose bytes are in a cache may exceed the rate of memory,
and those that compute much stay below it. No kernel of attention multiplies faster than products do.
"""
SHARES = (0.25, 1.3)
"""What products may reach in steps, of what a large one reaches alone, in each precision that is in the runs."""
START_SHARE = 0.8
ROUNDS = 50
"""Of a fit at most: with 25 a measurement that is off by a factor of 2 still pulls at the constants."""
START = Constants(
    products=1.0, bandwidth=1.0, misaligned=1.0, launch=1e-5, hiding=1.0, straggling=0.0, latency=1e-5, inside=1.0,
    between=1.0, strided=1.0, blocking=1.0, update=28.0, stages=1.0, attention=0.7, written=1.0,
)  # fmt: skip
"""Where a fit begins. A processor launches its kernels and carries its messages itself, so that nothing of these hides
behind anything; no length of a row is odd for it; and one machine has no links between nodes.
"""
ALIGNED_ON_CARDS = 3.0
"""`Constants.misaligned` of tensor cores, as fitted to an A100."""
WATTS = 15.0
"""Of a core, as assumed."""
NO_LINK = Link("eth10", 1.25e9, 25e-6)


@dataclass(frozen=True)
class FittedDevice:
    """A device of so many ranks, and the errors of its constants on the runs that they were fitted to: predicted over
    measured seconds, minus 1.
    """

    device: Device
    measurements: RankMeasurements
    errors: tuple[float, ...]


@dataclass(frozen=True)
class MachineFacts:
    """What is known of the machine without measuring. memory: bytes for all ranks; cores: processors, or of a GPU its
    own.
    """

    kind: str
    name: str
    memory: float
    host_memory: float
    cores: float


def fitted_device(name: str, machine: MachineFacts, measurements: RankMeasurements) -> FittedDevice:
    """The device that these measurements describe."""
    latency, inside = message_times(measurements.collectives, measurements.ranks)
    rates, shared = measurements.rates, measurements.ranks if machine.kind == "cpu" else 1
    own = min(1.0, machine.cores / shared)  # a rank has so much of a processor for what a processor's second does
    device = Device(
        name,
        machine.kind,
        machine.memory / shared,
        MappingProxyType(dict(measurements.flops)),
        rates["bandwidth"],
        machine.cores,
        inside or rates["bandwidth"],
        rates["to_host"],
        machine.host_memory / measurements.ranks,
        WATTS * machine.cores / shared,
        "1xeth10",
        update_host=rates["update_host"],
        read=rates.get("read"),
        write=rates.get("write"),
        carried=rates["carried"] * own if machine.kind == "cpu" and "carried" in rates else None,
        beside=rates.get("beside"),
    )
    start = replace(START, latency=latency, waking=rates.get("waking", 0.0))
    if measurements.stages:
        start = replace(start, stages=message_times(measurements.stages, 2, halves=False)[1] / device.inside)
    if machine.kind == "cuda":
        start = replace(start, hiding=4.0, misaligned=ALIGNED_ON_CARDS)
    device, errors = fit_steps(device, start, measurements)
    context, holes = fit_memory(device, measurements)
    beside = {**measurements.memory, "context": context, "holes": holes}
    known = {**device.constants, **beside}
    return FittedDevice(replace(device, constants=MappingProxyType(known)), measurements, tuple(errors))


def message_times(measured: Sequence[tuple[float, float]], ranks: int, *, halves: bool = True) -> tuple[float, float]:
    """(seconds of a message beside its bytes for each doubling of its ranks, bytes that a rank sends in a second), by
    the model of `plan.cluster.messages`, with the least mean relative error. halves: of a ring's messages a rank sends
    (N - 1) / N. (START's latency, 0) without messages.
    """
    if not measured:
        return START.latency, 0.0
    sent = np.array([nbytes * ((ranks - 1) / ranks if halves else 1.0) for nbytes, _ in measured])
    seconds = np.array([each for _, each in measured])

    def errors(values: Floats) -> Floats:
        latency, per_byte = np.exp(values)
        return np.asarray(np.log((latency + sent * per_byte) / seconds))

    first = np.log([seconds.min(), seconds[-1] / sent[-1]])
    values = fitted(errors, first, (first - 5, first + 5), np.ones(len(seconds)))
    latency, per_byte = np.exp(values).tolist()
    return latency / float(np.log2(ranks)), 1 / per_byte


def update_bytes(rates: Mapping[str, float], reached: float) -> float:
    """Bytes that an update moves for each parameter, by the rate of updates, where kernels reach this share of memory's
    rate.
    """
    return GRADIENT / rates["update"] * rates["bandwidth"] * reached


def steps_of(device: Device, measurements: RankMeasurements) -> list[Run]:
    """The runs of the measurements."""
    return [run_of(each.flags, each.ranks, device.kind) for each in measurements.runs]


def planned(run: Run, device: Device, ranks: int) -> ClusterStep:
    """The step of a run with so many ranks, each of which has a device's part of the machine."""
    return ClusterStep(run, Cluster(device, ranks, ranks, 1, NO_LINK))


def fit_steps(device: Device, start: Constants, measurements: RankMeasurements) -> tuple[Device, list[float]]:
    """(the device with what its products reach in steps, and its constants, the errors of the runs)."""
    runs = steps_of(device, measurements)
    precisions = sorted({run.optimizer.precision for run in runs} & {*device.flops})
    seconds = np.array([each.seconds for each in measurements.runs])

    def known(logarithms: Floats) -> Device:
        values = np.exp(logarithms).tolist()
        shares, constants = values[: len(precisions)], dict(zip(BOUNDS, values[len(precisions) :], strict=True))
        of_runs = dict(zip(precisions, shares, strict=True))
        others = float(np.exp(np.mean(np.log(shares)))) if shares else 1.0
        flops = {name: rate * of_runs.get(name, others) for name, rate in device.flops.items()}
        constants["update"] = update_bytes(measurements.rates, constants["bandwidth"])
        fitted_constants = MappingProxyType(asdict(replace(start, **constants)))
        return replace(device, flops=MappingProxyType(flops), constants=fitted_constants)

    def errors(logarithms: Floats) -> Floats:
        pairs = zip(runs, measurements.runs, strict=True)
        steps = [planned(run, known(logarithms), each.ranks) for run, each in pairs]
        return np.asarray(np.log(np.array([step.seconds for step in steps]) / seconds))

    bounds = [SHARES] * len(precisions) + [*BOUNDS.values()]
    low, high = (np.log([bound[side] for bound in bounds]) for side in (0, 1))
    first = [START_SHARE] * len(precisions) + [getattr(start, name) for name in BOUNDS]
    values = fitted(errors, np.clip(np.log(first), low, high), (low, high), np.ones(len(runs)), ROUNDS)
    return known(values), np.expm1(errors(values)).tolist()


def fit_memory(device: Device, measurements: RankMeasurements) -> tuple[float, float]:
    """(bytes that every process takes beside its tensors, share of what comes and goes in a step that it takes for
    holes), of the runs that were the first of their processes. What only some runs take is left out (`beside_tensors`).
    """
    first = [
        (float(each.memory), planned(run, device, each.ranks))
        for each, run in zip(measurements.runs, steps_of(device, measurements), strict=True)
        if each.memory is not None
    ]
    taken = np.array([memory for memory, _ in first])
    own = taken - [step.tensors + step.allowance.fixed for _, step in first]
    columns = np.stack([np.ones(len(taken)), [float(step.passing) for _, step in first]], 1)
    context, holes = np.linalg.lstsq(columns, own, rcond=None)[0] if len(taken) > 1 else (0.0, -1.0)
    if holes < 0.0:  # less than none is noise
        context, holes = float(np.median(own)), 0.0
    return max(0.0, float(context)), float(holes)
