"""The memories of a rank's model state: the device, host memory and files. What each has allocated, the slots of host
memory through which parts pass, and the lanes on which they move beside the computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.config.tiers import Tier
from megazero.disk.lanes import Need
from megazero.disk.store import Store
from megazero.disk.swap import SwapSpace
from megazero.program.instruction import Instruction, Piece
from megazero.program.passes.slots import Tenant, tenant_of
from megazero.system.copy_thread import Copies, CopyThread
from megazero.system.streams import host_tensor


class BudgetExceeded(RuntimeError):
    """An allocation would exceed the device's budget."""


class DeviceMemory:
    """The device's memory, and the bytes of a model state there, by kind: columns, gathered parameters, whole
    gradients.

    device  on which tensors are allocated
    budget  the most that they may be together (--device-memory-budget); None: any number

    A plan has said before the start that a step fits (`plan.budgets`). This is the account of what is really allocated,
    so what it refuses the plan has counted wrongly. On a CUDA device the allocator has a limit too, which counts
    activations as well (`system.device.limit_memory`).
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.device, self.budget = device, budget
        self.held = Counter[str]()

    @property
    def nbytes(self) -> int:
        return self.held.total()

    def allocate(
        self, numel: int, dtype: torch.dtype, kind: str, what: str, make: Callable[..., Tensor] = torch.empty
    ) -> Tensor:
        """A tensor [numel]. make: `torch.zeros` or `torch.empty`. The rest as of `take`."""
        self.take(kind, numel * dtype.itemsize, what)
        return make(numel, dtype=dtype, device=self.device)

    def take(self, kind: str, nbytes: int, what: str) -> None:
        """Count an allocation that is about to be made. what: for the error. Raises BudgetExceeded."""
        if self.budget is not None and self.nbytes + nbytes > self.budget:
            taken = ", ".join(f"{size:,} of {name}" for name, size in self.held.most_common() if size)
            raise BudgetExceeded(
                f"--device-memory-budget {self.budget:,}: {what} would take {nbytes:,} bytes, and the model state has "
                f"{self.nbytes:,} already ({taken or 'nothing'}). By its plan the step fits, so the plan is "
                "wrong: this is a fault of megazero"
            )
        self.held[kind] += nbytes

    def give(self, kind: str, nbytes: int) -> None:
        """Count what has been freed."""
        self.held[kind] -= nbytes


class Tiers:
    """The memories of a rank, and the lanes between them: each lane works off what it is given in order, on a thread
    that starts with its first work.

    device     the device's memory
    stores     the files of what rests in files, by tier; none of a tier where nothing does
    to_host, to_device
               copies between device and host memory, by one thread each. Reads and writes have threads in `stores`
    host_updates
               work on what is in host memory, by one thread
    """

    def __init__(self, device: DeviceMemory, stores: Mapping[Tier, Store]) -> None:
        self.device, self.stores = device, stores
        self.to_host: Copies = CopyThread(device.device, "to-host")
        self.to_device: Copies = CopyThread(device.device, "to-device")
        self.host_updates: Executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-updates")

    @property
    def swap(self) -> SwapSpace | None:
        """The swap files, which alone have whole steps (--nvme-checkpoint); None where nothing rests on disks."""
        swap = self.stores.get(Tier.DISK)
        assert swap is None or isinstance(swap, SwapSpace)
        return swap

    @property
    def disks(self) -> SwapSpace:
        """The swap files, which there must be."""
        assert self.swap is not None, "no part rests on a disk"
        return self.swap

    def in_host_memory(self, numel: int, dtype: torch.dtype, flag: str) -> Tensor:
        """Zeros [numel] in host memory that the device copies at full speed. flag: what needs it, for errors."""
        return host_tensor(numel, dtype, self.device.device, flag)

    def beside_files(self, nbytes: int) -> Tensor:
        """Bytes in host memory that are read from files and written; none where nothing is there. Disks, the first
        store, take the same memory without a copy.
        """
        first = next(iter(self.stores.values()), None)
        return torch.empty(0, dtype=torch.uint8) if first is None else first.allocate(nbytes)

    def close(self, *, remove: bool = True) -> None:
        """End the lanes; what has not begun is cancelled. remove: delete the swap files too,
        which a run may go on from; all others are deleted.
        """
        self.to_host.close()
        self.to_device.close()
        self.host_updates.shutdown(cancel_futures=True)
        for store in self.stores.values():
            store.close(remove=remove or store is not self.swap)


@dataclass
class PartSlot:
    """Host memory for the pieces of one part on its way, and what there is to wait for.

    memory   bytes for each piece; none for one that no part has here
    free     before the part may use it
    arrived  before what the part has here is read
    changed  once the part is updated: waits for that, and says whether anything has changed
    ends     before another part takes the slot
    """

    memory: Mapping[Piece, Tensor]
    free: list[Need] = field(default_factory=list)
    arrived: list[Need] = field(default_factory=list)
    changed: Callable[[], bool] | None = None
    ends: list[Need] = field(default_factory=list)

    def of(self, piece: Piece, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The first elements of a piece, [numel]."""
        return self.memory[piece][: numel * dtype.itemsize].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory.values())


class Ring:
    """A few slots through which many parts pass. The step's list says which one a part has (`program.passes.slots`)."""

    def __init__(self, slots: Sequence[PartSlot]) -> None:
        self.slots = slots
        self.under_way: dict[Tenant, PartSlot] = {}

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def slot_of(self, i: Instruction) -> PartSlot:
        """The slot of an instruction. Its part has taken the slot already, or takes it now: what is to wait for before
        is in `free`.
        """
        assert i.slot >= 0, f"{i} has no slot"
        slot = self.slots[i.slot]
        tenant = tenant_of(i)
        if tenant not in self.under_way:
            for other, taken in self.under_way.items():
                bucket, part = other.key
                assert taken is not slot, f"{i} would overwrite bucket {bucket}, part {part}, which is under way"
            self.under_way[tenant] = slot
            slot.free, slot.arrived, slot.changed, slot.ends = slot.ends, [], None, []
        assert self.under_way[tenant] is slot, f"{i} has another slot than its part"
        return slot

    def passed(self, i: Instruction, over: Need) -> None:
        """An instruction has begun that uses a slot. over: waits for its end. The last one gives the slot to others."""
        self.under_way[tenant_of(i)].ends.append(over)
        if i.frees_slot:
            del self.under_way[tenant_of(i)]

    def assert_idle(self) -> None:
        """No part may be on its way."""
        parts = ", ".join("bucket {}, part {}".format(*tenant.key) for tenant in self.under_way)
        assert not self.under_way, f"{parts} is under way"

    def wait(self) -> None:
        """Return once all slots are free. Raises what has gone wrong."""
        self.assert_idle()
        for slot in self.slots:
            for end in slot.ends:
                end()
