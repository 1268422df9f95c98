"""The step of a rank of every stage in time: the seconds of computations by operations, of all else by bytes and
measured rates, when each lane works, and what then lies in which tier.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.config.derive import FULL, SELECTIVE
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunk_layers, layer_costs, stage_specs
from megazero.plan.flops import attention_core_flops, block_flops, head_flops
from megazero.plan.rank_state import StageBytes, stage_bytes
from megazero.plan.rates import MachineRates
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists, activation_pieces
from megazero.plan.step_memory import stage_trace
from megazero.program.instruction import Lane
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from megazero.program.trace import MemoryTrace, TierBytes, timed_step


def step_times(run: Run, axes: Axes, kind: str, rates: MachineRates) -> ChunkTimes:
    """The times of a rank's step in seconds. kind: of device, cpu or cuda, as in `plan.step_memory.stage_trace`.

    A backward takes twice its forward, and what it computes again. The lookup of an embedding counts an operation for
    each element.
    """
    table = recompute_table(run, axes, kind)
    specs, samples = stage_specs(run), run.schedule.micro_batch_size / run.parallel.tp
    units = tuple(_units(run, spec) for spec in specs)
    forward = tuple(sum(of_chunk) * samples / rates.flops for of_chunk in units)
    again = {FULL: block_flops(run.model), SELECTIVE: attention_core_flops(run.model)}
    backward = tuple(
        2 * whole + sum(again.get(table[block], 0) for block in spec.blocks) * samples / rates.flops
        for whole, spec in zip(forward, specs, strict=True)
    )
    each = 0.0 if rates.messages is None else 1 / rates.messages
    per_byte = {
        **dict.fromkeys((Lane.SHARDS, Lane.ACROSS, Lane.TENSOR), each),
        Lane.TO_HOST: 1 / rates.to_host,
        Lane.TO_DEVICE: 1 / rates.to_device,
        Lane.HOST: 1 / rates.update_host,
        Lane.FROM_DISK: 0.0 if rates.read is None else 1 / rates.read,
        Lane.TO_DISK: 0.0 if rates.write is None else 1 / rates.write,
    }
    return ChunkTimes(
        forward,
        backward,
        activation_plan(run, kind).hidden_bytes * each,
        units=units,
        per_byte=per_byte,
        update=1 / rates.update,
        beside=1.0 if rates.beside is None else rates.beside,
    )


def _units(run: Run, spec: StageSpec) -> tuple[float, ...]:
    """The operations of each unit of a chunk, for the forward of one sample."""
    lookup = float(run.model.seq_length * run.model.hidden_size)
    blocks = (float(block_flops(run.model)),) * len(spec.blocks)
    return (lookup,) * spec.has_embedding + blocks + (float(head_flops(run.model)),) * spec.has_head


def timed_traces(steps: StageLists, kind: str, rates: MachineRates) -> list[MemoryTrace]:
    """The memory of a step on a rank of each stage with its times, that with the largest peak first.

    kind: of device, cpu or cuda, as in `plan.step_memory.stage_trace`.
    """
    stages, states = [steps.of(stage) for stage in range(steps.axes.pp)], stage_bytes(steps.run, steps.axes)
    lists, shapes = [each.instructions for each in stages], [each.shape for each in stages]
    # All stages begin at 0, with a step that follows another.
    report = simulate(lists, step_times(steps.run, steps.axes, kind, rates), shapes, border=stages[0].border)
    traces = list[MemoryTrace]()
    for stage, state in enumerate(states):
        trace = stage_trace(steps, stage, state, kind)
        timed = timed_step(lists[stage], report, stage, trace.samples, _resting(steps, stage, state))
        traces.append(replace(trace, timed=timed))
    return sorted(traces, key=lambda each: -each.peak.total)


def _resting(steps: StageLists, stage: int, state: StageBytes) -> TierBytes:
    """What lies in host memory and in files all the time: state, slots, and buffers of the files."""
    pieces, off = activation_pieces(steps.of(stage)), state.elsewhere
    files = off.files + pieces.file_bytes(len(steps.run.offload.nvme_path))
    return TierBytes(0, off.memory + pieces.buffers, files)


def chunk_times(run: Run) -> ChunkTimes:
    """Relative times of the model chunks: the multiplications of their layers; a backward takes twice its forward."""
    embedding, block, head = layer_costs(replace(run, parallel=replace(run.parallel, partition_by="time")))
    sizes = chunk_layers(run)
    last = len(sizes) - 1
    forward = tuple(
        max(n * block + (embedding if i == 0 else 0) + (head if i == last else 0), 1.0) for i, n in enumerate(sizes)
    )
    return ChunkTimes(forward, tuple(2 * seconds for seconds in forward))
