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
from megazero.plan.step_memory import spare_bytes, stage_trace
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1003 --device cpu "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --eval-iters 0 --num-workers 0 --train-iters 3 "
    "--precision fp16 --split 100,0,0"
)
"""In fp16, whose products take no scratch memory of oneDNN, as those of bf16 do."""
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
)


class Held(NamedTuple):
    """Bytes of a rank. spare: of the pool's buffers after a step."""

    measured: int
    predicted: int
    spare: int
    predicted_spare: int
    columns: dict[str, int]


class _KeptSends(p2p._ThreadedSends):
    """Sends whose tensors this thread frees, at the end of the step: the profiler sees no other thread."""

    def keep(self, tensor: torch.Tensor, message: Any) -> None:
        super().keep(tensor, message)
        self.__dict__.setdefault("kept", []).append(tensor)

    def flush(self) -> None:
        super().flush()
        self.__dict__.pop("kept", None)


def held_on_rank(rank: int, size: int, flags: list[str]) -> Held:
    """The most that tensors take in the third step, metered from before the model is built.

    By then the pool has all its buffers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "_ThreadedSends", _KeptSends)
        with profile(profile_memory=True) as recorded:
            job, _ = job_on_rank(rank, size, flags)
            for _ in range(3):
                with record_function("step"):
                    job.trainer.train_step(stop=False)
    assert recorded.kineto_results is not None
    events = recorded.kineto_results.events()
    begin = max(e.start_ns() for e in events if e.name() == "step")
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    alive = accumulate(size for *_, size in changes)
    most = max(total for total, (at, *_) in zip(alive, changes, strict=True) if at >= begin)
    steps, at = StageLists(job.run, job.grid.axes, nccl=False), job.grid.at.pp
    state = stage_bytes(job.run, job.grid.axes)[at]
    peak = stage_trace(steps, at, state, "cpu").peak
    columns = {column.value: size for column, size in peak.columns.items()}
    spare = job.state.model.reducer.pool.nbytes
    return Held(most, peak.total, spare, spare_bytes(steps, at), columns)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), RUNS, ids=[words for _, words in RUNS])
def test_a_step_takes_what_is_planned(ranks: int, words: str, corpus: Path, tmp_path: Path) -> None:
    """To 2 %, on every rank: state, activations, buffers, what travels. The spare buffers to the byte."""
    data = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path)]
    for rank, held in enumerate(run_ranks(ranks, held_on_rank, ranks, [*MODEL.split(), *data, *words.split()])):
        assert held.measured == pytest.approx(held.predicted, rel=0.02), (rank, held)
        assert held.spare == held.predicted_spare, (rank, held)
