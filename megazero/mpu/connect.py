"""First use of the process groups of which a step uses collectives, before the first step."""

from __future__ import annotations

import torch

from megazero.mpu.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from megazero.mpu.grid import Group, ProcessGrid, uncounted
from megazero.system.device import synchronize


def connect(grid: ProcessGrid, *, quantised: bool = False) -> None:
    """Use each group once, where the backend connects a group only when it is used: NCCL.

    NCCL creates a communicator at the first collective and connects its channels at the first of each kind. It waits
    for the other ranks on the host for that, and memory that it allocates waits for the device. In a step, ranks would
    come to the first collectives of their groups in different orders, with receives of a pipeline posted before. Here
    all ranks take the groups in one order (`ProcessGrid.step_groups`).

    quantised  whether gradients are quantised: then the ranks that reduce them send each other parts

    All ranks call it. Returns when this rank's device has run the collectives. The bytes are not counted as traffic.
    """
    used = [group for group in grid.step_groups if group.is_on_device]
    reducing = {each.ranks for groups in grid.shared.values() for each in (groups.inner, groups.across)}
    for group in used:
        use_once(group, grid.device, parts=quantised and group.ranks in reducing)
    if used:
        synchronize(grid.device)


def use_once(group: Group, device: torch.device, *, parts: bool = False) -> None:
    """One collective of each kind with one int64 a rank, whose sums are exact. Raises RuntimeError for a wrong result.

    A collective of the group: an all-reduce, a reduce-scatter, an all-gather and a broadcast; with `parts` an
    all-to-all, for which NCCL connects every two ranks.
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
        exchanged = every[index] + ranks
        if parts:
            all_to_all(exchanged.zero_(), every + index, group).wait()
    exact = size * size * ranks + size * (size - 1) // 2
    if not torch.equal(every, exact) or last.item() != size - 1 or not torch.equal(exchanged, exact[index] + ranks):
        raise RuntimeError(
            f"the first collectives of ranks {list(group.ranks)} gave {every.tolist()}, not {exact.tolist()}"
        )
