"""The step of a rank of every stage in time: the seconds of computations by operations, of all else by bytes and rates,
when each lane works, and what then lies in which tier. Rates are of a file of --placement-rates, or measured at the
start (`train.measured_rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from megazero.config.layers.kinds import layers
from megazero.config.options import bytes_of, did_you_mean
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import stage_specs
from megazero.plan.flops import again_flops, block_flops, head_flops
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_memories
from megazero.program.instruction import READ_LANES, WRITE_LANES, Lane
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from megazero.program.trace import MemoryTrace, timed_step
from megazero.system.reading import Unreadable, shown
from megazero.system.yaml_file import load_yaml


@dataclass(frozen=True)
class MachineRates:
    """Of one rank, while all ranks of its host do the same.

    flops        floating-point operations of matrix products in a second
    to_host      bytes copied from the device to host memory in a second
    to_device    bytes copied back in a second
    update       bytes of gradients whose parameters the device updates in a second
    update_host  the same of the host's processor
    read         bytes read from all folders of --nvme-path in a second; None: nothing may rest on disks
    write        bytes written there in a second, until they are durable; None: nothing may rest on disks
    messages     bytes that a rank sends to others in a second; None: messages take no time
    workspace    bytes of the device that matrix products take for themselves (`train.measured_rates`), which a search
                 leaves free; None: nothing is known of it
    beside       the share of its speed, 0 to 1, that a computation keeps while the host's processors update or copy at
                 full speed; and these beside each other. None: computations run elsewhere, and nothing slows them down
    """

    flops: float
    to_host: float
    to_device: float
    update: float
    update_host: float
    read: float | None = None
    write: float | None = None
    messages: float | None = None
    workspace: float | None = None
    beside: float | None = None

    @property
    def has_disks(self) -> bool:
        return self.read is not None and self.write is not None

    @property
    def seconds_per_byte(self) -> dict[Lane, float]:
        """Of what passes each lane. What is not known takes no time."""
        of_lanes = {
            **dict.fromkeys((Lane.SHARDS, Lane.ACROSS, Lane.TENSOR), self.messages),
            Lane.TO_HOST: self.to_host,
            Lane.TO_DEVICE: self.to_device,
            Lane.HOST: self.update_host,
            **dict.fromkeys(READ_LANES, self.read),
            **dict.fromkeys(WRITE_LANES, self.write),
        }
        return {lane: 0.0 if rate is None else 1 / rate for lane, rate in of_lanes.items()}

    def times(self, run: Run, axes: Axes, kind: str) -> ChunkTimes:
        """`step_times` with these rates."""
        return step_times(run, axes, kind, self)

    def plain(self) -> dict[str, float]:
        """The numbers that are known, by name: a file of --placement-rates."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ASSUMED: Mapping[str, MachineRates] = MappingProxyType(
    {
        "cuda": MachineRates(3e14, 2e10, 2e10, update=2e11, update_host=5e9, read=3e9, write=2e9, messages=5e10),
        "cpu": MachineRates(1e11, 8e9, 8e9, update=2e9, update_host=2e9, read=2e9, write=1e9, messages=2e9),
    }
)
"""By kind of device: those of a large card and of some cores, for pictures of a step on a machine that nobody has
named."""
NAMES = tuple(field.name for field in fields(MachineRates))
NEEDED = NAMES[:5]


def read_rates(path: str) -> MachineRates:
    """The rates of a file: a number for each name; bytes may be written as 3GB. Raises ConfigError."""
    named = f"--placement-rates {path}"
    try:
        content = load_yaml(Path(path))
    except Unreadable as reason:
        raise ConfigError([f"--placement-rates {reason}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{named}: holds no table of {', '.join(NAMES)}"])
    numbers, problems = dict[str, float](), list[str]()
    for key, value in content.items():
        if key not in NAMES:
            problems.append(f"{named}: there is no {key}{did_you_mean(str(key), NAMES) or ': ' + ', '.join(NAMES)}")
            continue
        read, what = _OTHERS.get(key, (_rate, "a number above 0 in a second, such as 3e9 or 3GB"))
        try:
            numbers[key] = read(value)
        except ValueError:
            problems.append(f"{named}: {key}: {shown(value)} is not {what}")
    missing = [name for name in NEEDED if name not in content]
    problems += [f"{named}: {', '.join(missing)}: missing"] * bool(missing)
    if ("read" in content) != ("write" in content):
        problems.append(f"{named}: read and write go together: disks need both")
    if problems:
        raise ConfigError(problems)
    return MachineRates(**numbers)


def _share(value: object) -> float:
    # yes and true of YAML are bool, and so numbers to Python
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(value)
    return float(value)


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    number = float(bytes_of(value)) if isinstance(value, str) else float(value)
    if not 0 < number < float("inf"):
        raise ValueError(value)
    return number


def _bytes(value: object) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _rate(value)


_OTHERS: Mapping[str, tuple[Callable[[object], float], str]] = MappingProxyType(
    {"beside": (_share, "a number from 0 to 1"), "workspace": (_bytes, "a number of bytes, such as 32MB")}
)
"""What is no rate: how its value is read, and what it has to be."""


def step_times(run: Run, axes: Axes, kind: str, rates: MachineRates) -> ChunkTimes:
    """The times of a rank's step in seconds. kind: of device, cpu or cuda, as in `plan.step_memory.StageMemory`.

    A backward takes twice its forward, and what it computes again. The lookup of an embedding counts an operation for
    each element.
    """
    again = again_flops(run.model, recompute_table(run, axes, kind))
    specs, samples = stage_specs(run), run.schedule.micro_batch_size / run.parallel.tp
    units = tuple(_units(run, spec) for spec in specs)
    forward = tuple(sum(of_chunk) * samples / rates.flops for of_chunk in units)
    backward = tuple(
        2 * whole + sum(again[spec.blocks.start : spec.blocks.stop]) * samples / rates.flops
        for whole, spec in zip(forward, specs, strict=True)
    )
    per_byte = rates.seconds_per_byte
    return ChunkTimes(
        forward,
        backward,
        activation_plan(run, kind).hidden_bytes * per_byte[Lane.ACROSS],
        units=units,
        per_byte=per_byte,
        update=1 / rates.update,
        beside=1.0 if rates.beside is None else rates.beside,
    )


def _units(run: Run, spec: StageSpec) -> tuple[float, ...]:
    """The operations of each unit of a chunk, for the forward of one sample."""
    lookup = float(run.model.seq_length * run.model.hidden_size)
    here = layers(run.model)[spec.blocks.start : spec.blocks.stop]
    blocks = tuple(float(block_flops(layer, run.model.seq_length)) for layer in here)
    return (lookup,) * spec.has_embedding + blocks + (float(head_flops(run.model)),) * spec.has_head


def timed_traces(steps: StageLists, kind: str, rates: MachineRates) -> list[MemoryTrace]:
    """The memory of a step on a rank of each stage with its times, that with the largest peak first.

    kind: of device, cpu or cuda, as in `plan.step_memory.StageMemory`.
    """
    stages = [steps.of(stage) for stage in range(steps.axes.pp)]
    lists, shapes = [each.instructions for each in stages], [each.shape for each in stages]
    # All stages begin at 0, with a step that follows another.
    report = simulate(lists, step_times(steps.run, steps.axes, kind, rates), shapes, border=stages[0].border)
    traces = list[MemoryTrace]()
    for memory in stage_memories(steps, kind):
        trace = memory.trace
        timed = timed_step(lists[memory.stage], report, memory.stage, trace.samples, memory.resting)
        traces.append(replace(trace, timed=timed))
    return sorted(traces, key=lambda each: -each.peak.total)


def chunk_times(run: Run) -> ChunkTimes:
    """Relative times of the model chunks, by operations; a backward takes twice its forward."""
    forward = tuple(sum(_units(run, spec)) for spec in stage_specs(run))
    return ChunkTimes(forward, tuple(2 * seconds for seconds in forward))
