"""The most bytes that a rank of each stage takes in every tier: on the device, in host memory and on disks.

The device's are what the step's list allocates, and the host's what has left it. On a CPU they are the same memory, and
their sum counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.plan.bytes import StageBytes, has_nccl, stage_bytes
from megazero.plan.leaving_disks import activation_pieces
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import host_bytes, step_peak
from megazero.program.memory import MemoryColumn


@dataclass(frozen=True)
class TierPeaks:
    """The bytes of a rank of one stage.

    device  at the moment of a step with most of them, by column (`program.memory.MemoryColumn`)
    moment  that moment, in words
    host    of host memory, by what it is for. It is taken from the first step to the last
    disk    of the rank's swap files
    """

    stage: int
    device: Mapping[str, int]
    moment: str
    host: Mapping[str, int]
    disk: int

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def total_bytes(self) -> int:
        """Of both, for a CPU, where they are one memory."""
        return self.device_bytes + self.host_bytes


class RunPeaks:
    """The peaks of a run's stages. Each is computed when it is first asked for: of long lists that can take seconds.

    kind: of device, cpu or cuda, as in `plan.step_memory.stage_trace`.
    """

    def __init__(self, run: Run, axes: Axes, kind: str) -> None:
        self._kind, self._axes = kind, axes
        self._steps = StageLists(run, axes, nccl=has_nccl(run.parallel, axes))
        self._states = stage_bytes(run, axes)
        self._found: dict[int, TierPeaks] = {}

    def of(self, stage: int) -> TierPeaks:
        """Raises ConfigError as `plan.recompute.recompute_table` does."""
        if stage not in self._found:
            self._found[stage] = tier_peaks(self._steps, stage, self._states[stage], self._kind)
        return self._found[stage]

    def every(self) -> list[TierPeaks]:
        """Of all stages."""
        return [self.of(stage) for stage in range(self._axes.pp)]


@cache
def run_peaks(run: Run, axes: Axes, kind: str) -> RunPeaks:
    """The peaks of a run, once for all who ask."""
    return RunPeaks(run, axes, kind)


def tier_peaks(steps: StageLists, stage: int, state: StageBytes, kind: str) -> TierPeaks:
    """The bytes of a rank of this stage, whose model state takes `state`."""
    peak, off = step_peak(steps, stage, state, kind), state.elsewhere
    pieces = activation_pieces(steps.of(stage))
    elsewhere = MemoryColumn.OFFLOADED, MemoryColumn.HOST
    host = {
        "model state": off.memory - off.slots - off.buffers,
        "model state on its way": off.slots,
        "buffers of the swap files": off.buffers + pieces.buffers,
        "activations": host_bytes(steps, stage, kind) if steps.run.offload.offload_activations else 0,
    }
    return TierPeaks(
        stage,
        {column.value: size for column, size in peak.columns.items() if column not in elsewhere},
        f"number {peak.number} of its list, {peak.instruction}",
        {what: size for what, size in host.items() if size},
        off.files + pieces.file_bytes(len(steps.run.offload.nvme_path)),
    )
