"""Where a step's communication runs: a trace shows it on a stream of its own, beside what the backward computes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.program.shape import BucketShape
from megazero.system import device as devices
from tests.gpu.jobs import flags_of, job_on_card
from tests.gpu.test_nccl import one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not devices.cuda_available() or not dist.is_nccl_available(), reason="no NVIDIA GPU, or torch without NCCL"
    ),
]

# Large enough that a backward is longer than the copies of its buckets, small enough that there are many buckets.
# Attention with learned positions takes no time to compile.
MODEL = [
    *("--num-layers", "4", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "1024"),
    *("--bucket-size", "20000000", "--position-embedding", "learned"),
]
AHEAD = 500_000_000
"""Cycles that the card waits before the traced step, a quarter of a second. Meanwhile the host launches all of it.
A host that launches more slowly than the card computes would leave no kernel beside which a reduction could run.
"""
NUMBERS = "--micro-batch-size 4 --global-batch-size 4 --train-iters 50 --log-interval 50 --zero-stage 1".split()


@dataclass(frozen=True)
class Event:
    """What the card did, in microseconds."""

    name: str
    stream: int
    begin: float
    end: float


def on_card(recorded: profile, path: Path) -> list[Event]:
    """Kernels and copies of a trace, in order. The trace's file has their streams, the profiler's events have not."""
    recorded.export_chrome_trace(str(path))
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in found if event.get("cat") in kinds and "dur" in event]
    made = [
        Event(e["name"], int(e["args"]["stream"]), float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events
    ]
    return sorted(made, key=lambda event: event.begin)


@pytest.fixture
def grid() -> Iterator[ProcessGrid]:
    yield from one_rank("nccl", devices.resolve("cuda", 0))


@pytest.fixture
def sums_elsewhere(monkeypatch) -> None:
    """One rank's reduce-scatter in place is nothing to do, and NCCL does nothing.

    Into other memory it is a copy, which a trace shows.
    """
    reduce_scatter = collectives._reduce_scatter_flat

    def elsewhere(output: Tensor, whole: Tensor, **settings: Any) -> Any:
        return reduce_scatter(torch.empty_like(output), whole, **settings)

    monkeypatch.setattr(collectives, "_reduce_scatter_flat", elsewhere)


@pytest.fixture
def cut_backwards(monkeypatch) -> None:
    """A step's list cuts the backward where a bucket's gradient travels next. That of one rank travels nowhere."""
    monkeypatch.setattr(BucketShape, "travels", True)


def streams_by_work(events: list[Event]) -> tuple[set[int], dict[int, list[Event]]]:
    """(streams of matrix products, other streams with what ran there)."""
    products = {
        event.stream
        for event in events
        if any(word in event.name.lower() for word in ("gemm", "nvjet", "cutlass", "xmma"))
    }
    others: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.stream not in products:
            others[event.stream].append(event)
    return products, others


def test_reductions_run_on_their_own_stream_beside_the_backward(
    grid: ProcessGrid, sums_elsewhere: None, cut_backwards: None, corpus: Path, tmp_path: Path
) -> None:
    job, _ = job_on_card([*flags_of(NUMBERS, corpus, tmp_path / "cache"), *MODEL], grid)
    for _ in range(3):
        job.trainer.train_step(stop=False)
    devices.synchronize(grid.device)
    before = grid.replicas.traffic["reduce_scatter", torch.float32]
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        torch.cuda._sleep(AHEAD)
        job.trainer.train_step(stop=False)
        devices.synchronize(grid.device)
    travelled = grid.replicas.traffic["reduce_scatter", torch.float32] - before
    assert travelled >= sum(4 * p.numel() for stage in job.stages for p in stage.parameters())
    events = on_card(recorded, tmp_path / "trace.json")
    computing, others = streams_by_work(events)
    assert len(computing) == 1, f"products on streams {computing}"
    # The input's copies have a stream as well: those of the buckets are the longest that is beside.
    said = {stream: sorted({event.name[:60] for event in held}) for stream, held in others.items()}
    assert others, "everything ran on one stream"
    stream, copies = max(others.items(), key=lambda pair: sum(event.end - event.begin for event in pair[1]))
    large = [event for event in copies if event.end - event.begin > 2.0]
    assert len(large) >= 8, (stream, said)
    assert all("memcpy" in event.name.lower() or "nccl" in event.name.lower() for event in large), said
    (own,) = computing
    kernels = [event for event in events if event.stream == own]
    beside = [copy for copy in large if any(copy.begin < kernel.end and kernel.begin < copy.end for kernel in kernels)]
    # What the last bucket waits for is over when it travels; all before it are under the rest of the backward.
    assert len(beside) >= len(large) // 2, (
        f"{len(beside)} of {len(large)} reductions were under way while kernels ran: {said}"
    )
