"""How much a calibration measures, and what it has measured: values that pass between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Flags = tuple[str, ...]
UNTIMED = 3
"""First steps of a run, which make what later ones find."""
GROUPS = 2
"""Groups that the ranks of the first process make, to see what one takes."""


def _job(layers: int, hidden: int, length: int, vocabulary: int, precision: str, others: str = "") -> Flags:
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64} --seq-length {length}"
    return tuple(f"{shape} --vocab-size {vocabulary} --precision {precision} {others}".split())


FIRST = (
    _job(2, 256, 128, 2048, "fp32"),
    _job(4, 256, 256, 1024, "bf16", "--micro-batch-size 2"),
    _job(2, 384, 256, 2048, "fp32", "--recompute-granularity full"),
    _job(16, 64, 64, 512, "fp32"),
)
"""Small runs. The first one tells what a process takes beside its tensors, because nothing was there before it."""
SECOND = (
    _job(4, 128, 512, 1024, "bf16", "--micro-batch-size 4"),
    _job(4, 512, 128, 8192, "bf16", "--micro-batch-size 2"),
    _job(4, 512, 32, 4096, "bf16"),
    _job(2, 256, 128, 16384, "bf16"),
    _job(1, 768, 64, 2048, "fp32"),
    _job(8, 128, 128, 1024, "bf16", "--micro-batch-size 2"),
)
"""Others, of other processes. Of the first one's tensors most come and go within a step, as few do of the first of
`FIRST`: what it takes more beside its tensors is the holes that these leave.
"""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    ranks       numbers of ranks that share the machine, each measured by itself
    runs        the runs of a process, by process. The first one has all ranks as its replicas
    steps       steps of a run that are timed
    precisions  of products
    largest     bytes of the largest message, a quarter of what is copied
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    runs: tuple[tuple[Flags, ...], ...] = (FIRST, SECOND)
    steps: int = 7
    precisions: tuple[str, ...] = ("bf16", "fp32", "fp16", "fp64")
    largest: int = 1 << 24

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Effort:
        """What `text` has written."""
        given: dict[str, Any] = json.loads(text)
        runs = tuple(tuple(tuple(words) for words in process) for process in given["runs"])
        return cls(tuple(given["ranks"]), runs, given["steps"], tuple(given["precisions"]), given["largest"])


@dataclass(frozen=True)
class MeasuredRun:
    """A run of which steps were timed.

    ranks    its own: all of the machine are its replicas, or each makes such a run by itself, at the same time
    seconds  the median of a step, of the slowest rank
    memory   the most bytes of the fullest process, where it had made no run before; None: it had
    """

    flags: Flags
    ranks: int
    seconds: float
    memory: int | None


@dataclass(frozen=True)
class RankMeasurements:
    """What one of so many ranks reaches while all of them do the same; the slowest one.

    ranks, threads  of the machine, and with which each computes
    flops           operations of products in a second, by precision
    rates           amounts in a second by name: bandwidth, host, update_host, read, write; the share `beside`, and the
                    seconds `waking`
    memory          bytes beside tensors by name: of a `group`, and of the `compiler`; {} where they were not measured
    collectives     (bytes by the convention of `Group.traffic`, seconds) over all ranks
    stages          (bytes, seconds) of messages between two ranks, while all ranks send
    runs            the runs that were timed
    """

    ranks: int
    threads: int
    flops: Mapping[str, float]
    rates: Mapping[str, float]
    memory: Mapping[str, float]
    collectives: tuple[tuple[float, float], ...]
    stages: tuple[tuple[float, float], ...]
    runs: tuple[MeasuredRun, ...]

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> RankMeasurements:
        """What `text` has written."""
        given: dict[str, Any] = json.loads(text)
        runs = tuple(
            MeasuredRun(tuple(run["flags"]), run["ranks"], run["seconds"], run["memory"]) for run in given["runs"]
        )
        collectives, stages = (tuple(map(tuple, given[name])) for name in ("collectives", "stages"))
        return cls(
            given["ranks"], given["threads"], given["flops"], given["rates"], given["memory"], collectives, stages, runs
        )
