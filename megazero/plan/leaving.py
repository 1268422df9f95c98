"""What each unit of a stage keeps of a micro-batch, by arithmetic, and what of it leaves the device
(--offload-activations): its bytes in the list's shape, and whether the buffers hold them that lead to disks.
"""

from __future__ import annotations

from megazero.config.schema import Run
from megazero.config.tiers import plain_unit
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.chunk_bytes import chunk_bytes
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.tape import UnitBytes
from megazero.program.passes.leaving import LEAST_BUFFERS, buffer_bytes, largest_unit
from megazero.program.shape import RankShape
from megazero.system import device as devices


def unit_bytes(run: Run, axes: Axes, stage: int, kind: str) -> tuple[tuple[UnitBytes, ...], ...]:
    """The bytes of a stage's units, by its own number of a chunk and by unit. kind: of device, cpu or cuda."""
    plan, table, specs = activation_plan(run, kind), recompute_table(run, axes, kind), stage_specs(run)
    chunks = [chunk_bytes(plan, specs[number], table) for number in chunks_of(run).of(stage)]
    return tuple(tuple(unit for unit, count in chunk.runs for _ in range(count)) for chunk in chunks)


def with_kept(shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
    """The shape of a rank of this stage with what its units keep, where a list asks for that: where activations leave
    the device. Raises ConfigError as `plan.recompute.recompute_table` does.
    """
    if not run.offload.offload_activations:
        return shape
    return shape.keeping(leaving_bytes(run, axes, stage, devices.kind(run.parallel.device)))


def leaving_bytes(run: Run, axes: Axes, stage: int, kind: str) -> list[list[int]]:
    """The bytes that each unit of a stage keeps, by chunk and unit, and 0 of one that is not among those that leave.
    kind: of device, cpu or cuda.
    """
    leaves, specs = run.offload.offload_activations, stage_specs(run)
    names = [unit_names(specs[number]) for number in chunks_of(run).of(stage)]
    sizes = [[unit.kept + unit.input for unit in chunk] for chunk in unit_bytes(run, axes, stage, kind)]
    return [
        [size * (not leaves.units or leaves.names([plain_unit(name)])) for size, name in zip(*chunk, strict=True)]
        for chunk in zip(sizes, names, strict=True)
    ]


def writes_activations(run: Run) -> bool:
    """Whether activations go to disks."""
    return run.offload.offload_activations.on_disks


def buffer_problems(run: Run, axes: Axes, kind: str) -> list[str]:
    """A sentence if --nvme-buffer-bytes does not hold the buffers of activations on their way to disks. kind: of
    device, cpu or cuda. Raises ConfigError as `plan.recompute.recompute_table` does.
    """
    if not writes_activations(run):
        return []
    largest = largest_unit(chunk for stage in range(axes.pp) for chunk in leaving_bytes(run, axes, stage, kind))
    least, room = LEAST_BUFFERS * buffer_bytes(largest), run.offload.nvme_buffer_bytes
    if least <= room:
        return []
    return [
        f"--nvme-buffer-bytes {room} does not hold {LEAST_BUFFERS} times what a unit of the model keeps of a "
        f"micro-batch, as --offload-activations {run.offload.offload_activations} needs; nearest: --nvme-buffer-bytes "
        f"{least}"
    ]
