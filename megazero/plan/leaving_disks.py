"""What of a run's activations goes to disks (--offload-activations nvme), by arithmetic: buffers, pieces, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.disk.backend import DiskOptions
from megazero.disk.layout import SwapLayout
from megazero.mpu.axes import Axes
from megazero.pipeline.kept_disks import piece_names
from megazero.plan.kept import leaving_bytes
from megazero.plan.step_lists import StageStep
from megazero.program.instruction import Op
from megazero.program.passes.leaving_disks import LEAST_BUFFERS, buffer_bytes, largest_unit, most_pieces


@dataclass(frozen=True)
class ActivationPieces:
    """The activations of a rank on disks.

    buffer_bytes  of each host buffer through which they pass, and of each piece
    count         of pieces: the most graphs that have one at a time, in a step of the whole global batch
    written       graphs that are written in a step, and read again
    """

    buffer_bytes: int = 0
    count: int = 0
    written: int = 0

    @property
    def pieces(self) -> dict[str, int]:
        """The bytes of each piece, by name."""
        return dict.fromkeys(piece_names(self.count), self.buffer_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step writes, and reads."""
        return self.written * self.buffer_bytes

    @property
    def buffers(self) -> int:
        """Bytes of host memory through which the files are read and written."""
        return DiskOptions().memory_bytes if self.count else 0

    def file_bytes(self, folders: int) -> int:
        """Bytes of a rank's files in so many folders."""
        return sum(SwapLayout(self.pieces, (1.0,) * folders, slots=1).file_bytes) if self.count else 0


def activation_pieces(step: StageStep) -> ActivationPieces:
    """What of the activations of this list goes to disks."""
    writes = [i for i in step.instructions if i.op is Op.WRITE_ACTIVATIONS]
    if not writes:
        return ActivationPieces()
    size = buffer_bytes(largest_unit(step.shape.kept))
    return ActivationPieces(size, most_pieces(step.instructions), len(writes))


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
