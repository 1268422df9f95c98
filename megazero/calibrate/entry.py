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
from megazero.plan.cluster.fit import Floats, fitted
from megazero.plan.cluster.hardware import Cluster, Device, Link
from megazero.plan.cluster.kernels import Constants

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "products": (0.05, 2.0),
        "attention": (0.05, 2.0),
        "bandwidth": (0.05, 8.0),
        "launch": (5e-7, 1e-3),
        "update": (4.0, 400.0),
    }
)
"""What a step's time says of each constant that is fitted to it. Kernels whose bytes are in a cache exceed the rate of
memory, and small products stay below that of large ones.
"""
START = Constants(
    products=0.8, bandwidth=1.0, misaligned=1.0, launch=1e-5, hiding=1.0, straggling=0.0, latency=1e-5, inside=1.0,
    between=1.0, strided=1.0, blocking=1.0, update=28.0, stages=1.0, attention=0.7,
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
    measured seconds, and memory, minus 1.
    """

    device: Device
    measurements: RankMeasurements
    errors: tuple[float, ...]
    memory_errors: tuple[float, ...]


@dataclass(frozen=True)
class Machine:
    """What is known of the machine without measuring. memory: bytes for all ranks; cores: processors, or of a GPU its
    own.
    """

    kind: str
    name: str
    memory: float
    host_memory: float
    cores: float


def fitted_device(name: str, machine: Machine, measurements: RankMeasurements) -> FittedDevice:
    """The device that these measurements describe."""
    latency, inside = message_times(measurements.collectives, measurements.ranks)
    rates, shared = measurements.rates, measurements.ranks if machine.kind == "cpu" else 1
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
        beside=rates.get("beside"),
    )
    start = replace(START, latency=latency, update=update_bytes(rates, measurements))
    if measurements.stages:
        start = replace(start, stages=message_times(measurements.stages, 2, halves=False)[1] / device.inside)
    if machine.kind == "cuda":
        start = replace(start, hiding=4.0, misaligned=ALIGNED_ON_CARDS)
    constants, errors = fit_steps(device, start, measurements)
    device = replace(device, constants=MappingProxyType(asdict(constants)))
    context, fragmentation, memory_errors = fit_memory(device, measurements)
    known = {**device.constants, "context": context, "fragmentation": fragmentation}
    return FittedDevice(
        replace(device, constants=MappingProxyType(known)), measurements, tuple(errors), tuple(memory_errors)
    )


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


def update_bytes(rates: Mapping[str, float], measurements: RankMeasurements) -> float:
    """`Constants.update`, from the rate of an update alone: each 4 bytes of gradients are a parameter."""
    return float(min(400.0, 4.0 * rates["bandwidth"] / rates["update"]))


def steps_of(device: Device, measurements: RankMeasurements) -> list[Run]:
    """The runs of the measurements."""
    return [run_of(each.flags, measurements.ranks, device.kind) for each in measurements.runs]


def planned(run: Run, device: Device, ranks: int) -> ClusterStep:
    return ClusterStep(run, Cluster(device, ranks, ranks, 1, NO_LINK))


def fit_steps(device: Device, start: Constants, measurements: RankMeasurements) -> tuple[Constants, list[float]]:
    """(the constants, the errors of the runs)."""
    names, runs = list(BOUNDS), steps_of(device, measurements)
    seconds = np.array([each.seconds for each in measurements.runs])

    def constants_of(logarithms: Floats) -> Constants:
        return replace(start, **dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    def errors(logarithms: Floats) -> Floats:
        known = replace(device, constants=MappingProxyType(asdict(constants_of(logarithms))))
        predicted = [planned(run, known, measurements.ranks).seconds for run in runs]
        return np.asarray(np.log(np.array(predicted) / seconds))

    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip(np.log([getattr(start, name) for name in names]), low, high)
    values = fitted(errors, first, (low, high), np.ones(len(runs)))
    return constants_of(values), np.expm1(errors(values)).tolist()


def fit_memory(device: Device, measurements: RankMeasurements) -> tuple[float, float, list[float]]:
    """(bytes that a process takes beside its tensors, share of these that it takes beside them, relative errors), of
    the runs that were the first of their processes.
    """
    known = [
        (each, run)
        for each, run in zip(measurements.runs, steps_of(device, measurements), strict=True)
        if each.memory is not None
    ]
    taken = np.array([float(each.memory or 0) for each, _ in known])
    tensors = np.array([float(planned(run, device, measurements.ranks).tensors) for _, run in known])
    columns = np.stack([np.ones(len(taken)), tensors], 1) / taken[:, None]
    context, whole = np.linalg.lstsq(columns, np.ones(len(taken)), rcond=None)[0] if len(taken) > 1 else (0.0, 0.0)
    if whole < 1.0:  # what is less than the tensors is noise
        whole = 1.0
        context = float(np.median(taken - tensors))
    errors = (context + whole * tensors) / taken - 1
    return max(0.0, float(context)), float(whole) - 1.0, errors.tolist()
