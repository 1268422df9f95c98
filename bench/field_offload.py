"""The tables of `bench/peers.py` with model state in host memory or on disks.

Both sides keep their files in folders of one temporary folder (`TMPDIR`), and open them with O_DIRECT. Updates at the
end of a step and late ones are a table each, so that both meet the peers in turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.entries import ALONE, TWO_BLOCKS, Table, deepspeed, megazero
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
AS_MUCH = ("--nvme-buffer-bytes", str(BUFFERS * 4 * SUB_GROUP))
"""megazero's host memory for what is on its way: that of these buffers."""
PARAMETERS = {"device": "nvme", "buffer_count": 12, "buffer_size": ALONE.vocabulary * ALONE.hidden, "max_in_cpu": 0}
"""A buffer holds the largest parameter, and no other host memory has any."""


def infinity(stage: int, name: str, **zero: Any) -> Entry:
    """DeepSpeed in one process, with these entries of its `zero_optimization`."""
    title = f"DeepSpeed ZeRO-{stage}, {name}"
    return deepspeed(stage, "", title, replicas=1, zero={"sub_group_size": SUB_GROUP, **zero}, aio=AIO)


KINDS = {
    "host": (
        "optimizer state in host memory",
        ("--offload-optimizer", "cpu"),
        (infinity(2, "host", offload_optimizer=HOST), infinity(3, "host", offload_optimizer=HOST)),
    ),
    "nvme": (
        "optimizer state on disks",
        ("--offload-optimizer", "nvme", *AS_MUCH),
        (infinity(3, "NVMe", offload_optimizer=DISKS),),
    ),
    "nvme-params": (
        "optimizer state and parameters on disks",
        ("--offload-optimizer", "nvme", "--offload-params", "nvme", *AS_MUCH),
        (infinity(3, "NVMe, parameters too", offload_optimizer=DISKS, offload_param=PARAMETERS, **TWO_BLOCKS),),
    ),
}
"""What rests off the device: the words for it, megazero's flags, the rivals."""


def offloaded(kind: str, late: bool) -> Table:
    """The table of a kind, with late updates of megazero or without."""
    where, flags, rivals = KINDS[kind]
    on_time = megazero(f"megazero, {kind}", *flags)
    ours = replace(megazero(f"megazero, {kind}, late", *flags, "--late-update"), note="the updates of the step before")
    title = f"{where}: one process with 2 threads, BLOOM, 8 layers of 1024, 1 x {ALONE.sequence} tokens"
    if late:
        return Table(f"offload-{kind}-late", title, ALONE, ours, (on_time, *rivals))
    return Table(f"offload-{kind}", title, ALONE, on_time, rivals)


OFFLOADED = tuple(offloaded(kind, late) for kind in KINDS for late in (False, True))
