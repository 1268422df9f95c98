"""A device that waits at first launches, with every schedule; and that a warm-up leaves no trace."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megazero.mpu.grid import Group
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.schedule import forward_only, make_schedule
from megazero.program.instruction import Instruction
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def ends(schedule: Sequence[Sequence[Instruction]], *, warm: bool) -> bool:
    """Whether all stages come to the end of their lists on NCCL's rules, where a first launch drains the device.

    A stage issues its list in order. A computation needs its message. One that is the first of its kind on this stage
    (operation, chunk, and whether its gradients are the step's first) also needs every transfer that the stage has
    posted to be complete. A transfer is complete when both of its ends are posted: the i-th send of a channel and the
    i-th receive. Nothing else waits.
    """
    at = [0] * len(schedule)
    seen: list[set[tuple[object, int, bool]]] = [set() for _ in schedule]
    posted: Counter[tuple[int, int, bool, bool]] = Counter()  # by sender, receiver, gradients, whether it is the send
    own: list[deque[tuple[int, int, bool, int]]] = [deque() for _ in schedule]
    received: dict[tuple[int, int, int, bool], tuple[int, int, bool, int]] = {}

    def complete(transfer: tuple[int, int, bool, int]) -> bool:
        sender, receiver, gradients, number = transfer
        return min(posted[sender, receiver, gradients, end] for end in (True, False)) > number

    def may(stage: int, i: Instruction) -> bool:
        needed = received.get((stage, i.micro_batch, i.chunk, i.is_backward))
        if needed is not None and not complete(needed):
            return False
        kind = (i.op, i.chunk, i.micro_batch == 0)
        return warm or kind in seen[stage] or all(map(complete, own[stage]))

    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(schedule):
            while at[stage] < len(instructions):
                i = instructions[at[stage]]
                if i.is_compute:
                    if not may(stage, i):
                        break
                    seen[stage].add((i.op, i.chunk, i.micro_batch == 0))
                else:
                    channel = (stage, i.peer, i.is_backward) if i.is_send else (i.peer, stage, i.is_backward)
                    number = posted[(*channel, i.is_send)]
                    posted[(*channel, i.is_send)] += 1
                    own[stage].append((*channel, number))
                    if not i.is_send:
                        received[stage, i.micro_batch, i.chunk, i.is_backward] = (*channel, number)
                at[stage] += 1
                moved = True
    return all(done == len(instructions) for done, instructions in zip(at, schedule, strict=True))


def cases() -> list[tuple[str, int, int, int]]:
    return [(name, pp, m, chunks) for name, chunks in SCHEDULES for pp in range(2, 9) for m in range(1, 17)]


@pytest.mark.slow
def test_every_schedule_ends_where_its_computations_are_warm() -> None:
    for name, pp, m, chunks in cases():
        schedule = make_schedule(name, pp, m, chunks)
        assert ends(schedule, warm=True), (name, pp, m)
        assert ends([forward_only(stage) for stage in schedule], warm=True), (name, pp, m)


def test_without_a_warm_up_the_first_step_would_hang() -> None:
    """At one micro-batch always: a stage posts the receive of its gradient before the first launch of its forward."""
    hangs = {
        (name, pp, m) for name, pp, m, chunks in cases() if not ends(make_schedule(name, pp, m, chunks), warm=False)
    }
    assert {(name, pp, 1) for name, _ in SCHEDULES for pp in range(2, 9)} <= hangs
    assert len([case for case in hangs if case[0] == "zb-v"]) > len(cases()) // len(SCHEDULES) // 2


WORDS = "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --precision bf16 --train-iters 2 --eval-iters 1"
FLAGS = [*small_model(4, heads=6), *WORDS.split(), "--hidden-dropout", "0.1", "--seed", "5"]
LAYOUTS = {
    "1f1b, ZeRO-1, tied": (2, "--zero-stage 1"),
    "ZeRO-2": (4, "--zero-stage 2"),
    "zb-h1, untied": (4, "--tp 2 --pipeline-schedule zb-h1 --untie-embeddings-and-output-weights"),
    "zb-v, recomputed": (2, "--pipeline-schedule zb-v --virtual-stages 2 --recompute-granularity full --zero-stage 1"),
    "interleaved": (2, "--virtual-stages 2"),
    "FP8, sequence parallel": (
        4,
        "--tp 2 --sequence-parallel --fp8 delayed --hidden-size 64 --num-attention-heads 4 --seq-length 16",
    ),
    "fp16 that overflows": (2, "--precision fp16 --initial-loss-scale 4294967296"),
}
Trained = tuple[list[float], dict[str, float], list[torch.Tensor]]


def trained(rank: int, size: int, flags: list[str], warm: bool) -> Trained:
    """Losses, validation losses and final weights of this rank; and whether both engines began as they should."""
    job, recorder = job_on_rank(rank, size, flags)
    begun: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        original = PipelineEngine.warm_up

        def counted(self: PipelineEngine, *arguments: object) -> None:
            begun.append("training")
            original(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(PipelineEngine, "warm_up", counted)
        assert isinstance(job.trainer.engine, PipelineEngine)
        job.trainer.engine.is_warm = dict.fromkeys((True, False), warm)
        job.fit()
    assert begun == ([] if warm else ["training"]) and all(job.trainer.engine.is_warm.values())
    weights = [job.state.model.weights.held(index).clone() for index in range(len(job.state.model.buckets))]
    return [float(record.loss) for record in recorder.records], recorder.losses, weights


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_warm_up_leaves_no_trace(layout: str, corpus: Path, tmp_path: Path) -> None:
    """Every loss, validation losses and the weights have the same bits with and without one."""
    size, more = LAYOUTS[layout]
    flags = [*FLAGS, "--pp", "2", *more.split(), *data_flags(corpus, tmp_path)]
    cold, warm = (run_ranks(size, trained, size, flags, begins_warm) for begins_warm in (False, True))
    for ours, theirs in zip(cold, warm, strict=True):
        assert ours[:2] == theirs[:2]
        assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2], strict=True))
    assert len(cold[0][0]) == 2 and cold[0][1], "rank 0 has records and validation losses"


def asks_for_one(rank: int, flags: list[str], on_host: bool) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "is_on_host", on_host)
        job, _ = job_on_rank(rank, 2, flags)
        assert isinstance(job.trainer.engine, PipelineEngine)
        return not any(job.trainer.engine.is_warm.values())


def test_a_backend_whose_receives_wait_on_the_host_needs_none(corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--pp", "2", "--no-shared-memory", *data_flags(corpus, tmp_path)]
    assert run_ranks(2, asks_for_one, flags, True) == [False, False]
    assert run_ranks(2, asks_for_one, flags, False) == [True, True]
