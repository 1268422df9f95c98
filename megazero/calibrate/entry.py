"""From what the ranks have measured to an entry of a file of hardware: rates as they are, and constants that are fitted
to the seconds of whole steps, by the same arithmetic that predicts steps afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import numpy as np

from megazero.calibrate.effort import RankMeasurements
from megazero.calibrate.runs import run_of
from megazero.config.schema import Run
from megazero.plan.cluster.beside_tensors import is_narrow
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
"""What each constant of a CPU may be that is fitted to steps. Kernels whose bytes are in a cache may exceed the rate of
memory, and those that compute much stay below it. No kernel of attention multiplies faster than products do.
"""
CARD_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "attention": (0.2, 1.0),
        "bandwidth": (0.2, 2.0),
        "launch": (1e-6, 1e-4),
        "update": (7.0, 100.0),
    }
)
"""The same of a GPU, whose host launches kernels beside others. What an update moves is fitted, because a timed update
of `train.measured_rates` waits for the device each time.
"""
SHARES = (0.25, 1.3)
"""What products may reach in steps, of what a large one reaches alone, in each precision that is in the runs."""
START_SHARE = 0.8
ROUNDS = 50
"""Of a fit at most: with 25 a measurement that is off by a factor of 2 still pulls at the constants."""
START = Constants(
    products=1.0, bandwidth=1.0, misaligned=1.0, launch=1e-5, hiding=1.0, straggling=0.0, latency=1e-5, inside=1.0,
    between=1.0, strided=1.0, blocking=1.0, update=28.0, stages=1.0, attention=0.7, written=1.0, factors=1.0,
)  # fmt: skip
"""Where a fit begins. A processor launches its kernels and carries its messages itself, so that nothing of these hides
behind anything; no length of a row is odd for it; and one machine has no links between nodes.
"""
CARD_START = replace(START, hiding=20.0, misaligned=2.65, stages=0.0)
"""The same of a GPU. An H200's steps took what its host took, or what the card took, whichever was longer; the odd rows
of tensor cores are as fitted to an A100; and messages between stages, if they are not measured, are as collectives.
"""
WATTS, CARD_WATTS = 15.0, 500.0
"""Of a core, and of a card that nobody knows, as assumed."""
BETWEEN_CARDS = ("straggling", "between", "strided", "blocking")
"""Constants that one machine's cards do not show."""
OF_COLLECTIVES = ("latency", "inside")
"""Constants that one card alone does not show either. A device has a number `inside`, too."""
NO_LINKS, NO_LINK = "1xeth10", Link("eth10", 1.25e9, 25e-6)


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
    own; like: of a GPU the entry of our file that has its name, None if there is none.
    """

    kind: str
    name: str
    memory: float
    host_memory: float
    cores: float
    like: Device | None = None

    @property
    def watts(self) -> float:
        """Under load."""
        if self.kind == "cpu":
            return WATTS * self.cores
        return CARD_WATTS if self.like is None else self.like.watts

    def unseen(self, ranks: int) -> dict[str, float]:
        """The constants of messages that so many cards of one machine do not show, where others of their kind did."""
        names = BETWEEN_CARDS + FITS[self.kind].of_several * (ranks == 1)
        return {} if self.like is None else {name: self.like.constants[name] for name in names}


def fitted_device(name: str, machine: MachineFacts, measurements: RankMeasurements) -> FittedDevice:
    """The device that these measurements describe."""
    latency, inside = message_times(measurements.collectives, measurements.ranks)
    rates, of_kind = measurements.rates, FITS[machine.kind]
    shared = measurements.ranks if of_kind.is_shared else 1
    own = min(1.0, machine.cores / shared)  # a rank has so much of a processor for what a processor's second does
    device = Device(
        name,
        machine.kind,
        machine.memory / shared,
        MappingProxyType(dict(measurements.flops)),
        rates["bandwidth"],
        machine.cores,
        inside or (rates["bandwidth"] if machine.like is None else machine.like.inside),
        rates["to_host"],
        machine.host_memory / measurements.ranks,
        machine.watts / shared,
        NO_LINKS if machine.like is None else machine.like.interconnect,
        update_host=rates["update_host"],
        read=rates.get("read"),
        write=rates.get("write"),
        carried=rates["carried"] * own if of_kind.is_shared and "carried" in rates else None,
        beside=rates.get("beside"),
        threads=measurements.threads if of_kind.is_shared else None,
    )
    start = replace(of_kind.start, latency=latency, waking=rates.get("waking", 0.0))
    if measurements.stages:
        start = replace(start, stages=message_times(measurements.stages, 2, halves=False)[1] / device.inside)
    device, errors = fit_steps(device, replace(start, **machine.unseen(measurements.ranks)), measurements)
    known = {**device.constants, **measurements.memory, **of_kind.beside(device, measurements)}
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


def products_of(run: Run) -> str:
    """The key in `Device.flops` of most products of a run."""
    return run.optimizer.precision if run.optimizer.fp8 == "off" else "fp8"


def fit_steps(device: Device, start: Constants, measurements: RankMeasurements) -> tuple[Device, list[float]]:
    """(the device with what its products reach in steps, and its constants, the errors of the runs)."""
    runs, of_kind = steps_of(device, measurements), FITS[device.kind].bounds
    precisions = sorted({products_of(run) for run in runs} & {*device.flops})
    seconds = np.array([each.seconds for each in measurements.runs])

    def known(logarithms: Floats) -> Device:
        values = np.exp(logarithms).tolist()
        shares, constants = values[: len(precisions)], dict(zip(of_kind, values[len(precisions) :], strict=True))
        of_runs = dict(zip(precisions, shares, strict=True))
        others = float(np.exp(np.mean(np.log(shares)))) if shares else 1.0
        flops = {name: rate * of_runs.get(name, others) for name, rate in device.flops.items()}
        if "update" not in of_kind:
            constants["update"] = update_bytes(measurements.rates, constants["bandwidth"])
        fitted_constants = MappingProxyType(asdict(replace(start, **constants)))
        return replace(device, flops=MappingProxyType(flops), constants=fitted_constants)

    def errors(logarithms: Floats) -> Floats:
        pairs = zip(runs, measurements.runs, strict=True)
        steps = [planned(run, known(logarithms), each.ranks) for run, each in pairs]
        return np.asarray(np.log(np.array([step.seconds for step in steps]) / seconds))

    bounds = [SHARES] * len(precisions) + [*of_kind.values()]
    low, high = (np.log([bound[side] for bound in bounds]) for side in (0, 1))
    first = [START_SHARE] * len(precisions) + [getattr(start, name) for name in of_kind]
    values = fitted(errors, np.clip(np.log(first), low, high), (low, high), np.ones(len(runs)), ROUNDS)
    return known(values), np.expm1(errors(values)).tolist()


def beside_on_card(device: Device, measurements: RankMeasurements) -> dict[str, float]:
    """{"fragmentation": the share of a run's tensors that the allocator takes beside them, of all runs whose memory is
    known}. Of small runs whole segments are a large share, so each counts by its bytes.
    """
    pairs = zip(measurements.runs, steps_of(device, measurements), strict=True)
    known = [(each.memory, planned(run, device, 1).tensors) for each, run in pairs if each.memory is not None]
    taken, tensors = (float(sum(each)) for each in zip(*known, strict=True)) if known else (1.0, 1.0)
    return {"fragmentation": max(0.0, taken / tensors - 1)}


def fit_memory(device: Device, measurements: RankMeasurements) -> dict[str, float]:
    """What a process takes beside its tensors, by name (`beside_tensors`), of the runs that were the first of their
    processes: its `context`, `narrow` for kernels of 16 bits, and `holes`, a share of what comes and goes in a step.

    Holes are what more is free between two steps of a run than of one in which less comes and goes.
    """
    own, passing, free, narrow = list[float](), list[float](), list[float](), list[bool]()
    for each, run in zip(measurements.runs, steps_of(device, measurements), strict=True):
        if each.memory is not None and each.free is not None:
            step = planned(run, device, each.ranks)
            own.append(each.memory - step.tensors - step.allowance.fixed)
            passing.append(float(step.passing))
            free.append(float(each.free))
            narrow.append(is_narrow(run))
    holes = 0.0
    if len(own) > 1:
        columns = np.stack([np.ones(len(free)), passing], 1)
        holes = max(0.0, float(np.linalg.lstsq(columns, np.array(free), rcond=None)[0][1]) - 1.0)  # less is noise
    taken, has_narrow = np.array(own) - holes * np.array(passing), np.array(narrow, dtype=bool)
    context = max(0.0, float(taken[~has_narrow].mean() if not has_narrow.all() else taken.mean() if own else 0.0))
    added = max(0.0, float(taken[has_narrow].mean()) - context) if has_narrow.any() else 0.0
    return {"context": context, "narrow": added, "holes": holes}


@dataclass(frozen=True)
class KindFit:
    """How a kind of device is fitted.

    bounds      of the constants that are fitted to steps, by name; `update`, where it has none, follows from its rate
    start       of the fit
    beside      finds what lies beside tensors in memory, by name
    is_shared   whether the ranks of a machine share its only device
    of_several  what one rank alone does not show
    """

    bounds: Mapping[str, tuple[float, float]]
    start: Constants
    beside: Callable[[Device, RankMeasurements], dict[str, float]]
    is_shared: bool
    of_several: tuple[str, ...]


FITS: Mapping[str, KindFit] = MappingProxyType(
    {
        "cpu": KindFit(BOUNDS, START, fit_memory, is_shared=True, of_several=()),
        "cuda": KindFit(CARD_BOUNDS, CARD_START, beside_on_card, is_shared=False, of_several=OF_COLLECTIVES),
    }
)
"""By kind of device."""
