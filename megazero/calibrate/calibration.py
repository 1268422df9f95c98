"""A calibration of this machine, from the check of its file to the file: `megazero plan --calibrate FILE.yaml`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from fused_ops.fp8 import unavailable_reason
from megazero.calibrate.effort import UNTIMED, Effort, RankMeasurements, median_of
from megazero.calibrate.entry import (
    FITS,
    WATTS,
    FittedDevice,
    MachineFacts,
    fitted_device,
    products_of,
    steps_of,
)
from megazero.calibrate.ranks import measured
from megazero.plan.cluster.hardware import NUMBERS, OPTIONAL, FoundDevice, entry_of
from megazero.system import device as devices
from megazero.system import threads
from megazero.system.durable import replace_file
from megazero.system.host_memory import available_bytes
from megazero.system.words import counted
from megazero.system.writable import closed, why_not_replaced

HEAD = "# megazero hardware: measured"
"""The beginning of every file of a calibration: such a file may be written again."""
FLAG = "--calibrate"
DEFAULT_NAME = "here"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
MEASURED, FITTED, SYSTEM, ASSUMED = "ranks", "fit", "system", "assumed"
_OF_SYSTEM = frozenset({"memory", "host_memory", "processors"})
_ASSUMED = frozenset(
    {
        "watts",
        "interconnect",
        "products",
        "misaligned",
        "hiding",
        "straggling",
        "between",
        "strided",
        "blocking",
        "written",
        "factors",
    }
)
"""Numbers that are not measured: by design of the model, or because one machine does not show them."""


def require_calibration(target: Path, name: str, ranks: int | None) -> None:
    """Refuse before minutes are spent. Raises FileExistsError for a place that may not be written to, and ValueError
    for a wrong name or number of ranks.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--gpu {name}: the name of an entry is of a-z, 0-9, - and ., and begins with none of the last"
        )
    most = 4 * os_cores()
    if ranks is not None and not 1 <= ranks <= most:
        raise ValueError(f"--gpus {ranks}: this machine is measured with 1 to {most} ranks")
    wrong = why_not_replaced(target, HEAD, len(HEAD), f"file of {FLAG}")
    if wrong is None and not target.parent.is_dir():
        wrong = "there is no such folder"
    if wrong is None:
        wrong = closed(str(target.parent))
    if wrong is not None:
        raise FileExistsError(f"{FLAG} {target}: {wrong}")


def os_cores() -> int:
    """Cores that the ranks of this machine have."""
    return threads.threads_per_rank(1)


def numbers_of_ranks(ranks: int | None, kind: str = "cpu") -> tuple[int, ...]:
    """The numbers of ranks that are measured: 1 and doublings of it up to this, or to twice the cores, 4 at most. Ranks
    of GPUs share nothing, and are measured together.
    """
    if kind == "cuda":
        return (ranks or devices.device_count(devices.resolve(kind, 0)),)
    most = min(4, 2 * os_cores()) if ranks is None else ranks
    return tuple(sorted({*(1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most), most}))


def effort_here(ranks: int | None) -> Effort:
    """All that is measured on this machine. ranks: at most; None: as many as it suggests."""
    kind = devices.kind("auto")
    return Effort.of(kind, numbers_of_ranks(ranks, kind), has_fp8=kind == "cuda" and unavailable_reason(kind) is None)


def calibrate(target: Path, name: str, effort: Effort, say: Callable[[str], None]) -> None:
    """Measure this machine and write its entry. say: gets a line for each round and for each number of ranks. Raises
    NotMeasured.
    """
    machine, fitted = machine_here(), list[FittedDevice]()
    rounds = list[list[RankMeasurements]]()
    for number in range(1, effort.rounds + 1):
        rounds.append([measured(ranks, target.parent, effort) for ranks in effort.ranks])
        say(f"round {number} of {effort.rounds}: {', '.join(counted(ranks, 'rank') for ranks in effort.ranks)}")
    for of_ranks in zip(*rounds, strict=True):
        one = fitted_device(name, machine, median_of(of_ranks))
        say(line_of(one))
        fitted.append(one)
    text = "\n".join(entry_lines(machine, fitted, effort)) + "\n"
    replace_file(Path(os.path.realpath(target)), text.encode(), uuid4().hex)


def machine_here() -> MachineFacts:
    """What is known of this machine."""
    kind = devices.kind("auto")
    device = devices.resolve(kind, 0)
    host = float(available_bytes() or devices.total_memory_bytes(devices.resolve("cpu", 0)) or 1 << 30)
    if kind == "cpu":
        return MachineFacts(kind, devices.name(device), host, host, float(os_cores()))
    facts = devices.card_facts(device)
    memory = float(devices.total_memory_bytes(device) or 1)
    like = entry_of(FoundDevice(kind, devices.name(device), int(memory)))
    return MachineFacts(kind, devices.name(device), memory, host, float(facts["multiprocessors"]), like)


def line_of(one: FittedDevice) -> str:
    """What was found with a number of ranks, in a line."""
    device = one.device
    rates = ", ".join(f"{rate / 1e9:.3g} GFLOP/s in {precision}" for precision, rate in device.flops.items())
    return f"{_ranks_words(one)}: {rates}, {device.bandwidth / 1e9:.3g} GB/s; {errors_words(one)}"


def _ranks_words(one: FittedDevice) -> str:
    """How many ranks were measured, and with how many threads each of them."""
    return f"{counted(one.measurements.ranks, 'rank')} of {counted(one.measurements.threads, 'thread')}"


def errors_words(one: FittedDevice) -> str:
    """How well the constants meet the runs that they were fitted to."""
    off, runs = [abs(error) for error in one.errors], len(one.errors)
    mean, most = sum(off) / len(off), max(off)
    return f"steps of {counted(runs, 'run')} are met to {mean:.1%} in the mean, {most:.1%} at most"


def entry_lines(machine: MachineFacts, fitted: Sequence[FittedDevice], effort: Effort) -> Iterator[str]:
    """The lines of the file."""
    first, *others = fitted
    yield f"{HEAD} by `megazero plan {FLAG}`. It may be written again by the same command."
    yield "#"
    yield "# Each number of ranks was measured by itself, while all ranks did the same; the slowest rank counts."
    yield "# Rates: the fastest of 3 trials of 0.05 s. Messages: the median of 9."
    yield f"# Steps of runs: the median of {effort.steps}, behind {UNTIMED} that make what later ones find."
    fits = ", ".join(sorted({products_of(run) for run in steps_of(first.device, first.measurements)}))
    yield f"# constants, flops in {fits}: fitted to the steps of the runs, by the arithmetic that predicts steps."
    yield "# flops in other precisions: of a large product, with the mean share that these reach in steps."
    yield "# ranks: what each rank has where so many share the machine; of other numbers a part of the nearest."
    yield "sources:"
    yield from (f"  {name}: {quoted(text)}" for name, text in sources(machine, fitted).items())
    yield "gpus:"
    yield f"  {quoted(first.device.name)}:"  # null and on are words, here
    yield from _device_lines(first, "    ")
    if others:
        yield "    ranks:"
    for other in others:
        yield f"      {other.measurements.ranks}:"
        yield from _device_lines(other, "        ")


def quoted(text: str) -> str:
    """A text as YAML reads it."""
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'


def sources(machine: MachineFacts, fitted: Sequence[FittedDevice]) -> Mapping[str, str]:
    """Where the numbers come from."""
    known = {SYSTEM: f"what the operating system says of {machine.name}, of which each rank has a part"}
    for one in fitted:
        ranks, on = one.measurements.ranks, f"{machine.name}, {_ranks_words(one)}"
        known[f"{MEASURED}-{ranks}"] = f"measured on {on}"
        known[f"{FITTED}-{ranks}"] = f"fitted to measured steps on {on}: {errors_words(one)}"
    known[ASSUMED] = _assumed(machine)
    return known


def _assumed(machine: MachineFacts) -> str:
    """Of what is not measured, where it comes from."""
    if machine.kind == "cpu":
        return (
            f"not measured: {WATTS:g} W a core; links between nodes, which one machine does not have; and what a "
            "processor has not: launches beside its kernels, odd rows, messages that it does not carry itself"
        )
    others = "assumed" if machine.like is None else f"of the entry {machine.like.name}"
    return f"not measured: watts, links and messages: {others}; odd rows and what hides the host's work: assumed"


def _unseen(one: FittedDevice) -> frozenset[str]:
    """Numbers and constants that are not measured with so many ranks."""
    return _ASSUMED.union(FITS[one.device.kind].of_several if one.measurements.ranks == 1 else ())


def _device_lines(one: FittedDevice, indent: str) -> Iterator[str]:
    device, ranks, unseen = one.device, one.measurements.ranks, _unseen(one)

    def pair(name: str, value: float | str) -> str:
        source = f"{MEASURED}-{ranks}"
        if name in _OF_SYSTEM:
            source = SYSTEM
        elif name in unseen:
            source = ASSUMED
        return f"[{value if isinstance(value, str) else f'{value:.4g}'}, {source}]"

    yield f"{indent}kind: {device.kind}"
    rates = (f"{precision}: [{rate:.4g}, {FITTED}-{ranks}]" for precision, rate in device.flops.items())
    yield f"{indent}flops: {{{', '.join(rates)}}}"
    for name in (*NUMBERS, *OPTIONAL, "threads"):
        if (value := getattr(device, name)) is not None:
            yield f"{indent}{name}: {pair(name, value)}"
    yield f"{indent}interconnect: {pair('interconnect', device.interconnect)}"
    yield f"{indent}constants:"
    yield from _constant_lines(one, f"{indent}  ")


def _constant_lines(one: FittedDevice, indent: str) -> Iterator[str]:
    ranks, unseen = one.measurements.ranks, _unseen(one)
    measured = {*one.measurements.memory, "waking", "update"} - {*FITS[one.device.kind].bounds}
    for name, value in one.device.constants.items():
        source = f"{MEASURED if name in measured else FITTED}-{ranks}"
        if name in unseen:
            source = ASSUMED
        yield f"{indent}{name}: [{value:.4g}, {source}]"
