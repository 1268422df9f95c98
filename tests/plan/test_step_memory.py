"""The memory of a whole step by arithmetic beside what torch's profiler measures of a training run."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd.profiler import profile, record_function

from megazero.mpu import p2p
from megazero.plan.bytes import stage_bytes
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import host_bytes, spare_bytes, stage_trace
from megazero.train.job import Job
from tests.parity.training import job_on_rank
from tests.plan.meter import allocations
from tests.ranks import run_ranks

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1003 --device cpu "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --eval-iters 0 --num-workers 0 --train-iters 3 "
    "--precision fp16 --split 100,0,0"
)
VERTICAL = "--micro-batch-order vertical"
RUNS = (
    (1, "--global-batch-size 2"),
    (2, "--zero-stage 0 --global-batch-size 4 --recompute-granularity selective"),
    (2, "--zero-stage 1 --global-batch-size 8"),
    (2, "--zero-stage 2 --global-batch-size 8 --precision bf16 --grad-reduce-dtype bf16"),
    (2, "--zero-stage 2 --global-batch-size 8 --bucket-size 60000"),
    (2, "--zero-stage 2 --no-overlap --global-batch-size 2"),
    (2, "--zero-stage 3 --global-batch-size 8 --recompute-granularity full"),
    (2, "--zero-stage 1 --zero-quantized-weights --zero-quantized-gradients int4 --global-batch-size 4"),
    (2, "--zero-stage 3 --zero-quantized-weights --zero-quantized-gradients int8 --global-batch-size 8"),
    (2, "--pp 2 --pipeline-schedule zb-h1 --zero-stage 2 --global-batch-size 4"),
    (4, "--zero-stage 3 --zero-shard-size 2 --global-batch-size 8"),
    (4, "--pp 2 --zero-stage 3 --global-batch-size 8"),
    (4, "--pp 2 --zero-stage 3 --late-update --global-batch-size 8"),
    (2, "--zero-stage 1 --zero-quantized-weights --late-update --global-batch-size 4"),
    (2, f"{VERTICAL} --zero-stage 3 --global-batch-size 14 --recompute-granularity full --seq-length 128"),
    (2, f"{VERTICAL} --zero-stage 2 --global-batch-size 10 --vertical-group-size 3"),
    (4, f"{VERTICAL} --pp 2 --zero-stage 3 --global-batch-size 12 --recompute-granularity full"),
    (2, f"{VERTICAL} --pp 2 --global-batch-size 6 --vertical-group-size 2 --pipeline-schedule zb-h1"),
    (1, "--offload-optimizer cpu --nvme-buffer-bytes 200KB --global-batch-size 2"),
    (2, "--offload-optimizer cpu:0.6 --zero-stage 2 --precision bf16 --global-batch-size 4"),
    (2, "--offload-optimizer cpu:0.3 --zero-stage 1 --precision fp32 --late-update --global-batch-size 4"),
    (2, "--offload-optimizer nvme --nvme-path {disk} --zero-stage 3 --nvme-buffer-bytes 300KB --global-batch-size 4"),
    (1, "--offload-params cpu --offload-optimizer cpu --nvme-buffer-bytes 200KB --global-batch-size 2"),
    (2, "--offload-params cpu:0.5 --zero-stage 3 --global-batch-size 4 --recompute-granularity full"),
    (2, "--offload-params nvme --offload-optimizer nvme --nvme-path {disk} --zero-stage 2 --nvme-buffer-bytes 300KB"),
    (4, "--offload-params nvme --nvme-path {disk} --zero-stage 3 --pp 2 --late-update --nvme-buffer-bytes 300KB"),
    (1, "--offload-gradients cpu --nvme-buffer-bytes 200KB --global-batch-size 4"),
    (2, "--offload-gradients cpu --zero-stage 3 --precision bf16 --nvme-buffer-bytes 100KB --global-batch-size 8"),
    (2, "--offload-gradients cpu:0.5 --zero-stage 0 --nvme-buffer-bytes 200KB --global-batch-size 8"),
    (2, "--offload-gradients cpu --zero-stage 1 --precision bf16 --grad-reduce-dtype bf16 --nvme-buffer-bytes 90KB"),
    (2, "--offload-gradients nvme --nvme-path {disk} --zero-stage 2 --no-overlap --nvme-buffer-bytes 300KB"),
    (2, f"{VERTICAL} --offload-gradients cpu --zero-stage 3 --global-batch-size 8 --recompute-granularity full"),
    (2, f"{VERTICAL} --zero-stage 3 --offload-activations cpu:0.5 --global-batch-size 8"),
    (2, "--offload-activations cpu --pp 2 --pipeline-schedule zb-h1 --hidden-dropout 0.1 --global-batch-size 4"),
    (2, "--offload-activations cpu:0.6 --zero-stage 3 --global-batch-size 8 --recompute-granularity selective"),
    (4, "--pp 2 --zero-stage 3 --global-batch-size 4 --bucket-size 37000 --num-layers 9 --vocab-size 2626"),
)


class Held(NamedTuple):
    """Bytes of a rank. spare: of the pool's buffers after a step. host: of those in host memory. On a CPU that is the
    same memory, so the meter sees it too.
    """

    measured: int
    predicted: int
    spare: int
    predicted_spare: int
    host: int
    predicted_host: int
    columns: dict[str, int]


class _KeptSends(p2p._ThreadedSends):
    """Sends whose tensors this thread frees, at the end of the step: the profiler sees no other thread."""

    def keep(self, tensor: torch.Tensor, message: Any) -> None:
        super().keep(tensor, message)
        self.__dict__.setdefault("kept", []).append(tensor)

    def flush(self) -> None:
        super().flush()
        self.__dict__.pop("kept", None)


def metered_job(rank: int, size: int, flags: list[str]) -> tuple[Job, int, int]:
    """A job after three steps, the most that tensors take in the third, metered from before the model is built, and the
    bytes of its swap files, which are gone by now.

    By the third step pools have all their buffers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "_ThreadedSends", _KeptSends)
        with profile(profile_memory=True) as recorded:
            job, _ = job_on_rank(rank, size, flags)
            for _ in range(3):
                with record_function("step"):
                    job.trainer.train_step(stop=False)
            job.state.model.wait_parameters()
            swaps = [job.state.model.host.swap]
            if job.activations is not None and job.activations.disks is not None:
                swaps.append(job.activations.disks.swap)
            files = sum(path.stat().st_size for swap in swaps if swap is not None for path in swap.paths)
            job.state.model.host.close()
    assert recorded.kineto_results is not None
    begin = max(e.start_ns() for e in recorded.kineto_results.events() if e.name() == "step")
    changes = allocations(recorded)
    alive = accumulate(change.size for change in changes)
    return job, max(total for total, change in zip(alive, changes, strict=True) if change.at >= begin), files


def held_on_rank(rank: int, size: int, flags: list[str]) -> Held:
    """The most that tensors take in the third step (`metered_job`)."""
    job, most, _ = metered_job(rank, size, flags)
    steps, at = StageLists(job.run, job.grid.axes, nccl=False), job.grid.at.pp
    state = stage_bytes(job.run, job.grid.axes)[at]
    peak = stage_trace(steps, at, state, "cpu").peak
    columns = {column.value: size for column, size in peak.columns.items()}
    spare, swap = job.state.model.reducer.pool.nbytes, job.state.model.host.swap
    slots = job.state.model.host._slots
    unseen = 0 if swap is None else swap.memory_bytes + sum(slot.memory.nbytes + slot.sums.nbytes for slot in slots)
    unseen += job.state.model.resting.buffer_bytes
    buffers = getattr(job.trainer.engine.parts.host, "buffers", None)  # type: ignore[union-attr]
    host = (0 if buffers is None else buffers.nbytes), host_bytes(steps, at, "cpu")
    return Held(most, peak.total - unseen, spare, spare_bytes(steps, at), *host, columns)


@pytest.mark.slow
@pytest.mark.sampled(cases=18)
@pytest.mark.parametrize(("ranks", "words"), RUNS, ids=[words for _, words in RUNS])
def test_a_step_takes_what_is_planned(ranks: int, words: str, corpus: Path, tmp_path: Path) -> None:
    """To 2 %, on every rank: state, activations, buffers, what travels. The spare buffers to the byte, those in host
    memory up to the alignment of their pieces.
    """
    data = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path)]
    words = words.format(disk=tmp_path)
    for rank, held in enumerate(run_ranks(ranks, held_on_rank, ranks, [*MODEL.split(), *data, *words.split()])):
        assert held.measured - held.host == pytest.approx(held.predicted, rel=0.02), (rank, held)
        assert held.host == pytest.approx(held.predicted_host, rel=0.01), (rank, held)
        assert held.spare == held.predicted_spare, (rank, held)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--recompute-granularity full --micro-batch-size 4 --global-batch-size 8"])
def test_memory_falls_by_what_leaves(words: str, corpus: Path, tmp_path: Path) -> None:
    """Long samples and many blocks, whose activations are most of the memory."""
    data = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path), "--num-layers", "8", "--seq-length", "256"]
    flags = [*MODEL.split(), *data, "--global-batch-size", "2", *words.split()]
    stays, leaves = (run_ranks(1, held_on_rank, 1, [*flags, "--offload-activations", to])[0] for to in ("none", "cpu"))
    falls, planned = stays.measured - leaves.measured + leaves.host, stays.predicted - leaves.predicted
    assert falls == pytest.approx(planned, rel=0.02) and falls > 0.5 * stays.columns["activations"], (stays, leaves)
    assert leaves.host == leaves.predicted_host > falls
