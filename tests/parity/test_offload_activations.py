"""--offload-activations changes no bit of a run: losses, norms and final weights are those of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.kept import HostActivations
from megazero.plan.leaving_disks import activation_pieces
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Lane
from megazero.program.traffic import traffic
from tests.parameters import values_of
from tests.parity.test_late_update import digest
from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.ranks import run_ranks

NUMBERS = [
    *("--device", "cpu", "--micro-batch-size", "1", "--train-iters", "3", "--lr", "1e-2", "--bucket-size", "4000"),
    *("--eval-interval", "2", "--precision", "fp32"),
]


class Bits(NamedTuple):
    """numbers: loss and norm of every step. weights: digests. moved: bytes that leave in a step, by the list. disk:
    bytes that were written.
    """

    numbers: list[tuple[float, float]]
    weights: list[str]
    moved: int
    disk: int


def bits_on_rank(rank: int, size: int, flags: list[str]) -> Bits:
    job, recorder = job_on_rank(rank, size, flags)
    job.fit()
    with job.state.model.reading():
        weights = digest(piece.values for piece in values_of(nn.ModuleList(job.stages)))
    engine, schedule = job.trainer.engine, job.run.schedule
    assert isinstance(engine, PipelineEngine)
    micro_batches = schedule.global_batch_size // (schedule.micro_batch_size * job.grid.axes.dp)
    moved = traffic(engine.lists.training(micro_batches), engine.lists.shape).get(Lane.TO_HOST, 0)
    host = engine.parts.host
    disk = 0
    if isinstance(host, HostActivations):
        if host.disks is not None:
            disk = host.disks.swap.bytes_written
            planned = activation_pieces(StageLists(job.run, job.grid.axes, nccl=False).of(job.grid.at.pp))
            assert disk == 3 * planned.step_bytes == host.disks.swap.bytes_read
            assert host.buffers.nbytes <= job.run.offload.nvme_buffer_bytes
        assert sum(buffer.nbytes for buffer in host.buffers.free) == host.buffers.nbytes, "all have been given back"
        assert (host.buffers.nbytes > 0) == (moved > 0), "what leaves by the list has left"
    else:
        assert host is None and not moved
    job.close()
    return Bits([(record.loss, record.grad_norm) for record in recorder.records], weights, moved, disk)


class Case(NamedTuple):
    """A layout. lora: whether adapters are trained. buffers: of what goes to disks."""

    ranks: int
    words: str
    lora: bool = False
    buffers: str = "300KB"


LLAMA = "--norm rmsnorm --activation swiglu --position-embedding rotary --num-query-groups 2 --disable-bias-linear"
V, VERTICAL = "--pp 2 --virtual-stages 2", "--micro-batch-order vertical"
CASES = {
    "one micro-batch": Case(1, "--global-batch-size 1 --precision bf16"),
    "seven micro-batches": Case(1, "--global-batch-size 7 --hidden-dropout 0.1 --precision fp16"),
    "llama": Case(1, f"--global-batch-size 2 {LLAMA}"),
    "softmax with dropout": Case(
        1, "--global-batch-size 2 --attention softmax --attention-dropout 0.2 --position-embedding learned"
    ),
    "documents": Case(1, "--global-batch-size 2 --document-mask --eod-id 0"),
    "selective": Case(1, "--global-batch-size 3 --recompute-granularity selective --precision fp64"),
    "every second block": Case(1, "--global-batch-size 3 --recompute-granularity full --recompute-num-layers 2"),
    "fp8": Case(1, "--global-batch-size 2 --precision bf16 --fp8 delayed --hidden-size 32 --seq-length 16"),
    "lora": Case(1, "--global-batch-size 2 --lora-rank 2 --lora-dropout 0.1", lora=True),
    "lora, codes": Case(1, "--global-batch-size 2 --lora-rank 2 --lora-base-bits 4 --precision bf16", lora=True),
    "tp, sequence parallel": Case(2, "--tp 2 --sequence-parallel --global-batch-size 2 --hidden-dropout 0.1"),
    "tp, shared inputs": Case(
        2, "--tp 2 --recompute-granularity full --shard-recompute-inputs --global-batch-size 2 --precision bf16"
    ),
    "tp, fp8": Case(
        2, "--tp 2 --sequence-parallel --precision bf16 --fp8 current --global-batch-size 2 --hidden-size 64"
    ),
    "1f1b over three": Case(3, "--pp 3 --global-batch-size 5"),
    "gpipe": Case(2, "--pp 2 --pipeline-schedule gpipe --global-batch-size 4 --recompute-granularity full"),
    "interleaved": Case(2, f"{V} --global-batch-size 4 --hidden-dropout 0.1"),
    "zb-h1, ZeRO-2": Case(4, "--pp 2 --pipeline-schedule zb-h1 --zero-stage 2 --global-batch-size 6"),
    "zb-v": Case(2, f"{V} --pipeline-schedule zb-v --global-batch-size 5 --precision bf16"),
    "zb-v, ZeRO-3": Case(4, f"{V} --pipeline-schedule zb-v --zero-stage 3 --global-batch-size 6"),
    "vertical, ZeRO-3": Case(2, f"{VERTICAL} --zero-stage 3 --global-batch-size 8 --hidden-dropout 0.1"),
    "vertical, groups, zb-h1": Case(
        2, f"{VERTICAL} --vertical-group-size 2 --pp 2 --pipeline-schedule zb-h1 --global-batch-size 6"
    ),
    "ZeRO-0": Case(2, "--global-batch-size 4"),
    "ZeRO-1, late": Case(2, "--zero-stage 1 --late-update --global-batch-size 14"),
    "ZeRO-3, selective": Case(2, "--zero-stage 3 --global-batch-size 4 --recompute-granularity selective"),
    "ZeRO-3, gathered once": Case(
        2, "--zero-stage 3 --zero3-regather step --zero3-gathered-bytes 1MB --global-batch-size 2"
    ),
    "ZeRO-3, full, lora": Case(
        2, "--zero-stage 3 --recompute-granularity full --global-batch-size 4 --lora-rank 2", lora=True
    ),
}


@pytest.fixture(scope="module")
def flags_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[str]]:
    """The flags of a model and its data, of adapters on a base too."""
    folder = tmp_path_factory.mktemp("offload")
    model, data = [*small_model(5, heads=4), *NUMBERS], data_flags(corpus, folder / "cache")

    def flags(lora: bool) -> list[str]:
        if not lora:
            return [*model, *data]
        base = folder / "base"
        if not base.exists():
            train(1, [*model, *data, "--global-batch-size", "4", "--train-iters", "1", "--save", str(base)])
        return [*NUMBERS, *data, "--init-from", str(base), "--seq-length", "12"]

    return flags


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_bit_changes(case: Case, flags_of: Callable[[bool], list[str]], tmp_path: Path) -> None:
    """With all that can leave, with a third of it, and with what can go to disks."""
    flags = [*flags_of(case.lora), *case.words.split()]
    disk = ["--nvme-path", str(tmp_path), "--nvme-buffer-bytes", case.buffers]
    stays, third, all_of_it, on_disk = (
        run_ranks(case.ranks, bits_on_rank, case.ranks, [*flags, "--offload-activations", *words])
        for words in (["none"], ["cpu:0.3"], ["cpu"], ["nvme", *disk])
    )
    for own, some, every, written in zip(stays, third, all_of_it, on_disk, strict=True):
        assert own[:2] == some[:2] == every[:2] == written[:2]
        assert own.moved == 0 and some.moved <= 0.3 * every.moved
        assert (written.disk > 0) == (written.moved > 0) and written.moved <= every.moved
    assert any(written.disk for written in on_disk)
    assert not list(tmp_path.glob("*swap*")), "files are removed"
    assert len({loss for loss, _ in stays[0].numbers}) == 3
    assert any(every.moved for every in all_of_it) and (case.ranks > 1 or any(some.moved for some in third))
