"""The seconds of a step's computations and messages on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.step_times import MachineRates, step_times
from megazero.program.times import ChunkTimes

REACHED = 0.5
"""The share of a device's products in a second that a step reaches."""
UPDATE = 28 / 4
"""Bytes of memory that an update moves for each byte of an fp32 gradient."""


@dataclass(frozen=True)
class ClusterRates:
    """What turns a run into seconds on a cluster, as `plan.placed_step.Rates`."""

    cluster: Cluster

    @property
    def has_disks(self) -> bool:
        return False

    def times(self, run: Run, axes: Axes, kind: str) -> ChunkTimes:
        """The times of a rank's step in seconds. kind: of device, cpu or cuda."""
        device = self.cluster.device
        inside = axes.tp * axes.dp * axes.cp <= self.cluster.nodes_of
        rates = MachineRates(
            flops=REACHED * device.flops[run.optimizer.precision],
            to_host=device.host,
            to_device=device.host,
            update=device.bandwidth / UPDATE,
            update_host=5e9,
            messages=device.inside if inside else self.cluster.node_rate / self.cluster.nodes_of,
        )
        return step_times(run, axes, kind, rates)
