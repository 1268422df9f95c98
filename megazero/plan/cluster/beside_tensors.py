"""What a process takes of a device beside the tensors of its step: what the driver and communicators take, and what the
allocator cannot use.

Of a device of `hardware.yaml` its constants say it: `context` are bytes of the driver's context with the kernels that
are loaded into it, `communicators` bytes of all communicators of a rank, and `fragmentation` is the share of tensors
that the allocator cannot use between them. An entry without them takes nothing: a CPU has neither a context nor NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.plan.cluster.hardware import Cluster

BESIDE = "driver and communicators"
"""What a process takes beside tensors, in a table of what is alive."""


@dataclass(frozen=True)
class Allowance:
    """What a process takes of a device beside the tensors of its step.

    fixed  bytes of the driver's context and of communicators
    share  of the tensors: what the allocator cannot use between them
    """

    fixed: float
    share: float

    def of(self, tensors: float) -> int:
        """The bytes of a device with so many bytes of tensors."""
        return round(tensors * (1 + self.share) + self.fixed)

    def room(self, memory: float) -> int:
        """The bytes of tensors for which a device with so many bytes has room."""
        return max(0, int((memory - self.fixed) / (1 + self.share)))


def allowance_of(cluster: Cluster) -> Allowance:
    """That of a device of a cluster. One device alone has no communicators."""
    constants = cluster.device.constants
    between = constants.get("communicators", 0.0) if cluster.gpus > 1 else 0.0
    return Allowance(constants.get("context", 0.0) + between, constants.get("fragmentation", 0.0))
