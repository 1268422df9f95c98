"""What there is to say about a run before its first step, as plain numbers and words.

`gather` computes a report from a run's lists once, without process groups. `banner`, `verdict` and `report_json` print
a report.
docs/reference/run-report.md says what each field is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.config.derive import padded_vocab, pipeline_schedule, shards_parameters, tiers
from megazero.config.inventory import parameters
from megazero.config.schema import Run
from megazero.config.source import Decision
from megazero.mpu.axes import Axes
from megazero.pipeline.build import step_options
from megazero.pipeline.graphs import replayed
from megazero.plan.budgets import budgets_of, has_budgets
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.flops import recomputed_flops, step_flops, trained_parameters
from megazero.plan.rank_state import StageBytes
from megazero.plan.recompute import activation_peaks, activation_plan, gathered_inputs, recompute_choice
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import StageMemory, TierPeaks, run_peaks, stage_memories
from megazero.plan.step_times import chunk_times
from megazero.plan.traffic import (
    GatheredBytes,
    Traffic,
    element_widths,
    gathered_bytes,
    moved_in_step,
    run_traffic,
    zero_1_traffic,
)
from megazero.program.instruction import LEAVE, Lane, Op
from megazero.program.passes.kept_graphs import kept_graphs
from megazero.program.simulate import simulate
from megazero.program.traffic import message_bytes, moved_bytes
from megazero.system import device as devices

_AXES = {Lane.SHARDS: "dp", Lane.ACROSS: "dp across sets"}
"""The axis of messages on model state, by their lane."""


@dataclass(frozen=True)
class ScheduleReport:
    name: str
    micro_batches: int
    groups: tuple[int, ...] | None
    bubble: float
    live: int
    replayed: int | None


@dataclass(frozen=True)
class RecomputeReport:
    blocks: Mapping[str, int]
    cost: float
    missed: float
    gathered: int
    peaks: tuple[int, ...]


@dataclass(frozen=True)
class LeavingReport:
    stage: int
    kept: int
    moved: int
    host: int
    files: int
    written: int


@dataclass(frozen=True)
class BudgetsReport:
    """Most bytes of a rank; None: any number. together: in both tiers, where they are one memory."""

    device: int | None
    host: int | None
    together: int | None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a rank of each stage."""

    stages: tuple[StageBytes, ...]
    moved: tuple[Mapping[str, int], ...]
    gathered: tuple[GatheredBytes, ...]
    decoded: int | None
    spare: tuple[int, ...]
    leaving: LeavingReport | None
    peaks: tuple[TierPeaks, ...]
    budgets: BudgetsReport | None
    assumed: bool


@dataclass(frozen=True)
class StateMessages:
    traffic: Traffic
    of_zero_1: float
    parameter: tuple[float, int] | None
    gradient: tuple[float, int] | None


@dataclass(frozen=True)
class AxisMessages:
    axis: str
    operation: str
    stage: int
    number: int
    bytes: int


@dataclass(frozen=True)
class MachineReport:
    """What only the run itself knows, which has processes and a device."""

    device: str
    allocator: str
    ways: Mapping[str, str]
    overlapped: bool
    ops: Mapping[str, str]
    about_ops: Mapping[str, str]


@dataclass(frozen=True)
class PredictionReport:
    """What a plan says of a step of the run on its own devices. mfu: None on a CPU, whose peak is not known."""

    cluster: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory: int
    room: int

    @classmethod
    def of(cls, step: ClusterStep) -> PredictionReport:
        mfu, room = step.mfu if step.kind == "cuda" else None, round(step.cluster.device.memory)
        cluster, borrowed = str(step.cluster), step.cluster.device.borrowed
        cluster += f", with what an {borrowed} reaches of its data sheet" if borrowed else ""
        return cls(cluster, step.seconds, step.tokens_per_second, mfu, step.memory_bytes, room)


@dataclass(frozen=True)
class RunReport:
    run: Run
    axes: Axes
    device_kind: str
    parameters: int
    trained: int | None
    vocabulary_rows: int
    schedule: ScheduleReport
    recompute: RecomputeReport | None
    memory: MemoryReport
    state_messages: StateMessages
    messages: tuple[AxisMessages, ...]
    machine: MachineReport | None = None
    prediction: PredictionReport | None = None
    data: str = ""
    start: str = ""
    samples: int | None = None
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    placement: tuple[str, ...] = ()
    changes: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()
    trace: str = ""
    unchecked: tuple[str, ...] = ()


def gather(steps: StageLists) -> RunReport:
    """The numbers of a run with these lists, whose vocabulary is known. The caller adds words with
    `dataclasses.replace`. Communicates nothing.

    Peaks of memory and messages, whose lists take seconds, are gathered where budgets or --report-json need them.
    """
    run, axes, kind = steps.run, steps.axes, devices.kind(steps.run.parallel.device)
    return RunReport(
        run,
        axes,
        kind,
        parameters(run.model),
        None if run.lora.lora_rank is None else trained_parameters(run),
        padded_vocab(run.model, run.parallel.tp),
        _schedule(steps),
        _recompute(run, axes, kind),
        _memory(steps, kind),
        _state_messages(steps),
        () if run.trainer.report_json is None else tuple(_messages(steps, kind)),
    )


def _schedule(steps: StageLists) -> ScheduleReport:
    run, micro_batches = steps.run, steps.micro_batches
    lists, shapes = steps.schedule()
    simulated = simulate(lists, chunk_times(run), shapes)
    groups = step_options(run).groups(micro_batches)
    return ScheduleReport(
        pipeline_schedule(run.parallel),
        micro_batches,
        None if groups is None else tuple(map(len, groups)),
        simulated.bubble,
        max(simulated.peak_activations),
        len(replayed(micro_batches, steps.axes.dp > 1)) if run.parallel.cuda_graphs else None,
    )


def _recompute(run: Run, axes: Axes, kind: str) -> RecomputeReport | None:
    """What backward computes again, over the model's operations. None where it computes nothing again, or where a
    budget decides and there is no card to try the body of attention.
    """
    budget = run.parallel.activation_memory_budget
    untried = kind == "cuda" and not devices.cuda_available()
    if untried if budget is not None else run.parallel.recompute_granularity == "none":
        return None
    choice = recompute_choice(run, axes, kind)
    return RecomputeReport(
        Counter(choice.table),
        recomputed_flops(run.model, 1, choice.table) / step_flops(run),
        choice.missed,
        max(gathered_inputs(run, axes, kind)) if run.parallel.shard_recompute_inputs else 0,
        () if budget is None else tuple(activation_peaks(run, axes, kind)),
    )


def _memory(steps: StageLists, kind: str) -> MemoryReport:
    run, stages, memories = steps.run, range(steps.axes.pp), stage_memories(steps, kind)
    sharded, codes = shards_parameters(run.parallel, run.offload), run.lora.lora_base_bits is not None
    # Of codes the least possible is not known. The stages between the first and the last one are alike.
    gathered = [gathered_bytes(steps, stage) for stage in sorted({0, stages[-1]}) if sharded and not codes]
    tried, budgets = has_budgets(run) or run.trainer.report_json is not None, budgets_of(run, kind)
    return MemoryReport(
        tuple(memory.state for memory in memories),
        tuple(map(_moved, memories)) if any(tiers(run).values()) else (),
        tuple(each for each in gathered if each is not None),
        max(steps.of(stage).budget for stage in stages) if codes else None,
        tuple(memory.spare for memory in memories),
        _leaving(memories) if run.offload.offload_activations else None,
        tuple(run_peaks(run, steps.axes, kind)) if tried else (),
        BudgetsReport(budgets.device, budgets.host, budgets.together) if has_budgets(run) else None,
        # What attention keeps depends on its body, which only a card can try.
        assumed=kind == "cuda" and not devices.cuda_available(),
    )


def _moved(memory: StageMemory) -> dict[str, int]:
    """Bytes that a step moves, by lane. With --nvme-checkpoint what stays on the device is written too."""
    step, copied = memory.steps.of(memory.stage), memory.state.elsewhere.copied
    moved = moved_in_step(step.instructions, step.shape)
    return {lane.value: amount + copied * (lane is Lane.TO_DISK) for lane, amount in moved.items()}


def _leaving(memories: Sequence[StageMemory]) -> LeavingReport:
    """Activations that leave the device, on the stage with most of them in host memory."""
    memory = max(memories, key=lambda memory: memory.waiting)
    step, pieces = memory.steps.of(memory.stage), memory.activations
    return LeavingReport(
        memory.stage,
        sum(graph.nbytes for graph in kept_graphs(step.instructions, step.shape)),
        sum(moved_bytes(i, step.shape) for i in step.instructions if i.op == LEAVE),
        memory.waiting + pieces.buffers,
        pieces.files,
        pieces.step_bytes,
    )


def _state_messages(steps: StageLists) -> StateMessages:
    """What a rank sends for each element of its model state in a step, beside what ZeRO-1 would send."""
    run, axes = steps.run, steps.axes
    own, of_zero_1, widths = run_traffic(run, axes), zero_1_traffic(run, axes), element_widths(run)
    replicas = axes.dp * axes.cp
    return StateMessages(
        own,
        own.total / (of_zero_1.total or 1.0),
        widths.parameter_blocks if (axes.shard_size or replicas) != 1 else None,
        widths.gradient_blocks if replicas > 1 else None,
    )


def _messages(steps: StageLists, kind: str) -> Iterator[AxisMessages]:
    """The messages of a step's list between stages and on model state, as `program.traffic.traffic` counts them."""
    hidden = activation_plan(steps.run, kind).hidden_bytes
    for stage in range(steps.axes.pp):
        step, sent = steps.of(stage), defaultdict[tuple[str, str], list[int]](list)
        for i in step.instructions:
            if i.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                sent["pp", i.op.value].append(hidden)
            elif i.lane in _AXES:
                sent[_AXES[i.lane], i.op.value].append(message_bytes(i, step.shape))
            if i.op is Op.REDUCE_ACROSS:  # under ZeRO-0 each rank of a set then needs the whole sum
                sums = [bucket for bucket in map(step.shape.buckets.__getitem__, i.buckets) if not bucket.sharded_state]
                sent["dp", "gather sums"].append(sum(bucket.messages.gather for bucket in sums if bucket.shards > 1))
        for (axis, operation), amounts in sent.items():
            if sum(amounts):
                yield AxisMessages(axis, operation, stage, len(amounts), sum(amounts))
