"""How much a calibration measures, and what it has measured: values that pass between processes as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Flags = tuple[str, ...]
UNTIMED = 3
"""First steps of a run, which make what later ones find."""
GROUPS = 2
"""Groups that the ranks of the first process make, to see what one takes."""


def _shape(layers: int, hidden: int, length: int, vocabulary: int) -> Flags:
    words = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 64}"
    return tuple(f"{words} --seq-length {length} --vocab-size {vocabulary}".split())


def _job(layers: int, hidden: int, length: int, vocabulary: int, precision: str, others: str = "") -> Flags:
    return (*_shape(layers, hidden, length, vocabulary), "--precision", precision, *others.split())


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
    _job(2, 128, 512, 1024, "fp32", "--micro-batch-size 2"),
    _job(1, 768, 256, 4096, "fp32"),
    _job(1, 768, 512, 4096, "bf16"),
    _job(1, 256, 1024, 1024, "fp32"),
)
"""Others, of other processes. The first one computes in 16 bits: a process has other kernels for that than the first of
`FIRST`, and other buffers of theirs.
"""


def _on_card(layers: int, hidden: int, length: int, vocabulary: int, precision: str, others: str = "") -> Flags:
    # with positions for which a GPU's own library has attention: others compile it, once for each shape
    return _job(layers, hidden, length, vocabulary, precision, f"--position-embedding rotary {others}")


CARD = (
    _on_card(2, 1024, 1024, 32768, "bf16", "--micro-batch-size 8"),
    _on_card(24, 256, 256, 1024, "bf16"),
    _on_card(2, 4096, 2048, 32768, "bf16", "--micro-batch-size 2"),
    _on_card(4, 2048, 2048, 16384, "bf16", "--micro-batch-size 4 --recompute-granularity full"),
    _on_card(2, 2048, 8192, 8192, "bf16"),
    _on_card(12, 768, 1024, 50304, "bf16"),
    _on_card(1, 2048, 1024, 131072, "bf16", "--micro-batch-size 4"),
    _on_card(1, 8192, 512, 4096, "bf16"),
    _on_card(8, 512, 512, 8192, "bf16", "--micro-batch-size 32"),
    _on_card(2, 3072, 1024, 8192, "bf16", "--micro-batch-size 8 --recompute-granularity selective"),
    _on_card(4, 1024, 1024, 8192, "fp16", "--micro-batch-size 8"),
    _on_card(2, 4096, 1024, 8192, "fp16", "--micro-batch-size 4"),
    _on_card(2, 1024, 512, 8192, "fp32", "--micro-batch-size 8"),
    _on_card(12, 256, 256, 1024, "fp32", "--micro-batch-size 2"),
)
"""Runs on a GPU: of rows that fill it and of rows that do not, of many parameters for few tokens, of attention that
costs most, of a head that does, and of so small kernels that their launches count.
"""
CARD_FP8 = (
    _on_card(2, 4096, 2048, 8192, "bf16", "--micro-batch-size 4 --fp8"),
    _on_card(4, 2048, 1024, 8192, "bf16", "--micro-batch-size 8 --fp8"),
)
"""The same of products of 8 bits, where the GPU has them."""
PRODUCT = _shape(1, 768, 1024, 1024)
CARD_PRODUCT = _shape(1, 8192, 4096, 1024)
"""The runs whose product is timed, and whose model state is updated, in each precision."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    ranks       numbers of ranks that share the machine, each measured by itself
    runs        the runs of a process, by process. The first one has all ranks as its replicas
    rounds      in each of which everything is measured once: a machine may change its pace every half minute
    steps       times at which a run is timed
    turn        steps of each of these: a GPU's host goes on to the next step before the GPU has ended one
    precisions  of products
    product     the run whose product is timed
    largest     bytes of the largest message, a quarter of what is copied
    """

    ranks: tuple[int, ...] = (1, 2, 4)
    runs: tuple[tuple[Flags, ...], ...] = (FIRST, SECOND)
    rounds: int = 3
    steps: int = 7
    turn: int = 1
    precisions: tuple[str, ...] = ("bf16", "fp32", "fp16", "fp64")
    product: Flags = PRODUCT
    largest: int = 1 << 24

    @classmethod
    def of(cls, kind: str, ranks: tuple[int, ...], *, has_fp8: bool = False) -> Effort:
        """All that is measured on devices of a kind (cpu or cuda). has_fp8: whether a GPU has products of 8 bits."""
        if kind == "cpu":
            return cls(ranks)
        runs, precisions = CARD + CARD_FP8 * has_fp8, (*cls.precisions, *["fp8"] * has_fp8)
        return cls(ranks, (runs,), 1, 5, 4, precisions, CARD_PRODUCT, 1 << 30)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Effort:
        """What `text` has written."""
        given: dict[str, Any] = json.loads(text)
        runs = tuple(tuple(tuple(words) for words in process) for process in given["runs"])
        lists = {name: tuple(given[name]) for name in ("ranks", "precisions", "product")}
        return cls(**{**given, **lists, "runs": runs})


@dataclass(frozen=True)
class MeasuredRun:
    """A run of which steps were timed.

    ranks    its own: all of the machine are its replicas, or each makes such a run by itself, at the same time
    seconds  the median of a step, of the slowest rank
    memory   the most bytes of the fullest process. None: it had made a run before, whose memory nobody tells apart
    free     bytes of its heap between two steps that are of no use to anybody, where that was so: those of what comes
             and goes in a step, and holes. None: as above
    """

    flags: Flags
    ranks: int
    seconds: float
    memory: int | None
    free: int | None


@dataclass(frozen=True)
class RankMeasurements:
    """What one of so many ranks reaches while all of them do the same; the slowest one.

    ranks, threads  of the machine, and with which each computes
    flops           operations of products in a second, by precision
    rates           amounts in a second by name: bandwidth, host, update_host, read, write; the share `beside`, and the
                    seconds `waking`
    memory          bytes beside tensors by name: of a CPU those of a `group`, and of the `compiler`; of a GPU those of
                    the driver's `context`; {} where they were not measured
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
            MeasuredRun(tuple(run["flags"]), run["ranks"], run["seconds"], run["memory"], run["free"])
            for run in given["runs"]
        )
        collectives, stages = (tuple(map(tuple, given[name])) for name in ("collectives", "stages"))
        return cls(
            given["ranks"], given["threads"], given["flops"], given["rates"], given["memory"], collectives, stages, runs
        )


def median_of(rounds: Sequence[RankMeasurements]) -> RankMeasurements:
    """Of each number the median over rounds, which have all measured the same."""
    first = rounds[0]
    return replace(
        first,
        flops=_medians([each.flops for each in rounds]),
        rates=_medians([each.rates for each in rounds]),
        memory=_medians([each.memory for each in rounds]),
        collectives=_middle_seconds([each.collectives for each in rounds]),
        stages=_middle_seconds([each.stages for each in rounds]),
        runs=tuple(_middle_run(same) for same in zip(*(each.runs for each in rounds), strict=True)),
    )


def _medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(table[name] for table in tables) for name in tables[0]}


def _middle_seconds(rounds: Sequence[Sequence[tuple[float, float]]]) -> tuple[tuple[float, float], ...]:
    """Of pairs (bytes, seconds)."""
    return tuple((same[0][0], statistics.median(each[1] for each in same)) for same in zip(*rounds, strict=True))


def _middle_run(same: Sequence[MeasuredRun]) -> MeasuredRun:
    seconds = statistics.median(run.seconds for run in same)
    return replace(
        same[0],
        seconds=seconds,
        memory=_middle_bytes([run.memory for run in same]),
        free=_middle_bytes([run.free for run in same]),
    )


def _middle_bytes(numbers: Sequence[int | None]) -> int | None:
    """None where a round has no number."""
    known = [number for number in numbers if number is not None]
    return int(statistics.median(known)) if len(known) == len(numbers) else None
