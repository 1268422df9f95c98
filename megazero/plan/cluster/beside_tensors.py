"""What a process takes of a device beside the tensors of its step: what the driver and communicators take, and what the
allocator cannot use.

Of a device of `hardware.yaml` its constants say it: `context` are bytes of the driver's context with the kernels that
are loaded into it, `communicators` bytes of all communicators of a rank, and `fragmentation` is the share of tensors
that the allocator cannot use between them. An entry without them takes nothing.

On a CPU everything that a process has is in the same memory, and some of it depends on the run: the memory in which the
ranks of a host exchange tensors, the groups of ranks (`group` bytes each), torch's compiler, which the first
recomputation imports (`compiler` bytes), and kernels of 16 bits with what they keep (`narrow` bytes). There `context`
is the process itself, and `holes` the share of what comes and goes within a step that the heap has beside it: model
state is allocated once, and leaves none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.parameter import StateGroup
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.shared_pages import shared_bytes

BESIDE = "driver and communicators"
"""What a process takes beside tensors, in a table of what is alive."""


@dataclass(frozen=True)
class Allowance:
    """What a process takes of a device beside the tensors of its step.

    fixed  bytes of the driver's context and of communicators
    share  of the tensors: what the allocator cannot use between them
    holes  of those tensors alone that come and go within a step
    """

    fixed: float
    share: float
    holes: float = 0.0

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
    fixed = constants.get("context", 0.0) + between
    return Allowance(fixed, constants.get("fragmentation", 0.0), constants.get("holes", 0.0))


def allowance_of_run(cluster: Cluster, run: Run, axes: Axes) -> Allowance:
    """That of a run, on a CPU with what depends on the run."""
    known, constants = allowance_of(cluster), cluster.device.constants
    if cluster.device.kind != "cpu":
        return known
    groups = len(groups_of(axes)) * constants.get("group", 0.0)
    compiler = constants.get("compiler", 0.0) * (run.parallel.recompute_granularity != "none")
    narrow = constants.get("narrow", 0.0) * is_narrow(run)
    return replace(known, fixed=known.fixed + groups + shared_bytes(run, axes) + compiler + narrow)


def is_narrow(run: Run) -> bool:
    """Whether a run computes in 16 bits."""
    return compute_dtype(run.optimizer.precision).itemsize == 2


def groups_of(axes: Axes) -> set[tuple[int, ...]]:
    """The groups of the first rank that are neither one rank nor the world."""
    at = Coordinates(0, 0, 0, 0)
    sets = [axes.tensor_ranks(at), axes.data_ranks(at), axes.pipeline_ranks(at), axes.context_ranks(at)]
    return {ranks for ranks in (*sets, *_state_groups(axes)) if 1 < len(ranks) < axes.world_size}


def _state_groups(axes: Axes) -> set[tuple[int, ...]]:
    at = Coordinates(0, 0, 0, 0)
    kinds = [axes.inner_ranks, axes.across_ranks]
    return {ranks for kind in StateGroup for of_kind in kinds if len(ranks := of_kind(kind, at)) > 1}
