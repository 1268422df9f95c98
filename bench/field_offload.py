"""The tables of `bench/peers.py` with model state in host memory or on disks.

Both sides keep their files in folders of one temporary folder (`TMPDIR`), and open them with O_DIRECT. Updates at the
end of a step, late ones and early ones are a table each, so that all meet the peers in turns.

The state of a step is the same with fewer tokens, and the computation is shorter: tables on `FEW_ALONE` say what the
disks decide, and those with several micro-batches what it takes to bring parameters for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.entries import ALONE, FEW, TWO_BLOCKS, Table, deepspeed, megazero
from bench.workload import Entry

AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 2,
    "single_submit": True,
    "overlap_events": False,
}
"""How DeepSpeed reads and writes: the fastest of those that were tried (docs/numbers/disk.md)."""
SUB_GROUP = 13_000_000
"""Parameters that DeepSpeed updates at a time: a block, so that one is read, one updated and one written."""
HOST = {"device": "cpu"}
BUFFERS = 12
"""Of a group's fp32 values. Three groups are under way, with three tensors and a gradient each."""
DISKS = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS}
AS_MUCH = ("--nvme-path", "{folder}", "--nvme-buffer-bytes", str(BUFFERS * 4 * SUB_GROUP))
"""megazero's disks, and its host memory for what is on its way: that of these buffers."""
WITHIN = ("--device-memory-budget", "2GB", "--host-memory-budget", "1GB", *AS_MUCH)
"""Less than what DeepSpeed takes with its optimizer state on disks: 3.5 GB in bf16, more in fp32."""
PARAMETERS = {"device": "nvme", "buffer_count": 12, "buffer_size": ALONE.vocabulary * ALONE.hidden, "max_in_cpu": 0}
"""A buffer holds the largest parameter, and no other host memory has any."""


def infinity(stage: int, name: str, **zero: Any) -> Entry:
    """DeepSpeed in one process, with these entries of its `zero_optimization`."""
    title = f"DeepSpeed ZeRO-{stage}, {name}"
    return deepspeed(stage, "", title, replicas=1, zero={"sub_group_size": SUB_GROUP, **zero}, aio=AIO)


STATE_ON_DISKS = infinity(3, "NVMe", offload_optimizer=DISKS)
KINDS = {
    "host": (
        "optimizer state in host memory",
        ("--offload-optimizer", "cpu"),
        (infinity(2, "host", offload_optimizer=HOST), infinity(3, "host", offload_optimizer=HOST)),
    ),
    "nvme": (
        "optimizer state on disks",
        ("--offload-optimizer", "nvme", *AS_MUCH),
        (STATE_ON_DISKS,),
    ),
    "nvme-params": (
        "optimizer state and parameters on disks",
        ("--offload-optimizer", "nvme", "--offload-params", "nvme", *AS_MUCH),
        (infinity(3, "NVMe, parameters too", offload_optimizer=DISKS, offload_param=PARAMETERS, **TWO_BLOCKS),),
    ),
    "nvme-limit": (
        "DeepSpeed's optimizer state on disks, megazero's placed by search within less memory than DeepSpeed takes",
        ("--placement", "auto", *WITHIN),
        (STATE_ON_DISKS,),
    ),
}
"""What rests off the device: the words for it, megazero's flags, the rivals."""


FEW_ALONE = replace(ALONE, name="wide, few tokens, one process", sequence=FEW.sequence)
"""A quarter of the tokens."""
ACCUMULATED = replace(FEW_ALONE, name="wide, few tokens, four micro-batches, one process", micro_batches=4)
"""As many tokens as `ALONE`, in four micro-batches."""
WORKLOADS = {"": ALONE, "-few": FEW_ALONE, "-accumulated": ACCUMULATED}
"""By what the names of their tables end with."""


NOTES = {
    "late": "the updates of the step before",
    "early": "beside the backward, before the norm is known, in steps of which none is clipped",
}
"""By when megazero updates."""
NEVER_CLIPPED = 1000.0


def offloaded(kind: str, size: str, updates: str) -> Table:
    """The table of a kind on a workload. updates: those of megazero, at the end of a step ("") or one of `NOTES`."""
    work = replace(WORKLOADS[size], clip=NEVER_CLIPPED) if updates == "early" else WORKLOADS[size]
    where, flags, rivals = KINDS[kind]
    on_time = megazero(f"megazero, {kind}", *flags)
    batch = f"{work.samples} x {work.sequence} tokens" + (", one sample at a time" if work.micro_batches > 1 else "")
    title = f"{where}: one process with 2 threads, BLOOM, 8 layers of 1024, {batch}"
    if updates:
        ours = replace(megazero(f"megazero, {kind}, {updates}", *flags, f"--{updates}-update"), note=NOTES[updates])
        return Table(f"offload-{kind}{size}-{updates}", title, work, ours, (on_time, *rivals))
    return Table(f"offload-{kind}{size}", title, work, on_time, rivals)


SEARCHED = ("nvme-limit",)
"""Kinds whose search chooses late updates or not, so that neither is given."""
_ON_DISKS = [(kind, "-few") for kind in ("nvme", "nvme-limit", "nvme-params")] + [("nvme-params", "-accumulated")]
_COMPARED = [*((kind, "") for kind in KINDS), *_ON_DISKS]
OFFLOADED = (
    *(
        offloaded(kind, size, updates)
        for kind, size in _COMPARED
        for updates in ("", "late")
        if not (updates and kind in SEARCHED)
    ),
    *(offloaded(kind, size, "early") for kind in ("nvme", "nvme-params") for size in ("", "-few")),
)
