"""First use of the process groups of which a step uses collectives, before the first step."""

from __future__ import annotations

import torch

from megazero.mpu.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from megazero.mpu.grid import Group, ProcessGrid, uncounted
from megazero.system.device import synchronize


def connect(grid: ProcessGrid) -> None:
    """Use each group once, where the backend connects a group only when it is used: NCCL.

    NCCL creates a communicator at the first collective and connects its channels at the first of each kind. It waits
    for the other ranks on the host for that, and memory that it allocates waits for the device. In a step, ranks would
    come to the first collectives of their groups in different orders, with receives of a pipeline posted before. Here
    all ranks take the groups in one order (`ProcessGrid.step_groups`).

    All ranks call it. Returns when this rank's device has run the collectives. The bytes are not counted as traffic.
    """
    used = [group for group in grid.step_groups if group.is_on_device]
    for group in used:
        use_once(group, grid.device)
    if used:
        synchronize(grid.device)


def use_once(group: Group, device: torch.device) -> None:
    """One collective of each kind with one int64 a rank, whose sums are exact. Raises RuntimeError for a wrong result.

    A collective of the group: an all-reduce, a reduce-scatter, an all-gather and a broadcast.
    """
    size, index = group.size, group.index
    ranks = torch.arange(size, dtype=torch.int64, device=device)
    total, part = ranks.clone(), torch.empty(1, dtype=torch.int64, device=device)
    with uncounted(group):
        all_reduce(total, group).wait()
        reduce_scatter(part, total + index, group).wait()
        every = torch.empty_like(ranks)
        all_gather(every, part, group).wait()
        last = ranks[index : index + 1].clone()
        broadcast(last, group, size - 1).wait()
    exact = size * size * ranks + size * (size - 1) // 2
    if not torch.equal(every, exact) or last.item() != size - 1:
        raise RuntimeError(
            f"the first collectives of ranks {list(group.ranks)} gave {every.tolist()}, not {exact.tolist()}"
        )
