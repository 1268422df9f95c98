"""The seconds that a simulated step takes: of computations by operations, of all else by bytes and measured rates."""

from __future__ import annotations

from megazero.config.derive import FULL, SELECTIVE, RecomputeTable
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.pipeline.stage_specs import stage_specs
from megazero.plan.flops import attention_core_flops, block_flops, head_flops
from megazero.plan.rates import MachineRates
from megazero.program.instruction import Lane
from megazero.program.times import ChunkTimes


def step_times(run: Run, table: RecomputeTable, hidden_bytes: int, rates: MachineRates) -> ChunkTimes:
    """The times of a rank's step in seconds. table: what backward computes again. hidden_bytes: of a message between
    stages.

    A backward takes twice its forward, and what it computes again. The lookup of an embedding counts an operation for
    each element.
    """
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
        hidden_bytes * each,
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
