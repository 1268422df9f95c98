"""Activations of a step on the card wait in host memory: the same bits, less memory, and the host waits for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.kept import HostActivations
from megazero.system import device as devices
from tests.gpu.jobs import assert_equal, deterministic_again, flags_of, job_on_card, train
from tests.gpu.synchronisation import raise_on_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not devices.cuda_available(), reason="no NVIDIA GPU")]

NUMBERS = ["--micro-batch-size", "4", "--global-batch-size", "12", "--num-layers", "8", "--log-interval", "50"]
LEAVES = ["--offload-activations", "cpu"]


@pytest.mark.parametrize("words", ["", "--recompute-granularity full", "--precision fp16 --hidden-dropout 0.1"])
def test_no_bit_changes(words: str, corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, *words.split(), "--deterministic", "--train-iters", "10"], corpus, tmp_path / "cache")
    with deterministic_again():
        assert_equal(train(flags), train([*flags, *LEAVES]))


def test_no_bit_changes_by_way_of_disks(corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, "--deterministic", "--train-iters", "10"], corpus, tmp_path / "cache")
    with deterministic_again():
        assert_equal(train(flags), train([*flags, "--offload-activations", "nvme", "--nvme-path", str(tmp_path)]))


def test_the_device_budget_is_the_limit_of_the_allocator() -> None:
    device, free = torch.device("cuda", torch.cuda.current_device()), 256 << 20
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        devices.limit_memory(device, torch.cuda.memory_reserved(device) + free)
        torch.empty(free // 2, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * free, dtype=torch.uint8, device=device)
    finally:
        devices.limit_memory(device, total)


def test_memory_falls_and_the_host_waits_for_nothing(corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, "--train-iters", "50"], corpus, tmp_path / "cache")
    most: list[int] = []
    for words in ([], LEAVES):
        job, _ = job_on_card([*flags, *words])
        for _ in range(3):  # kernels are compiled, tables made, host memory pinned
            job.trainer.train_step(stop=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with raise_on_synchronisation(job.grid.device):
            for _ in range(3):
                job.trainer.train_step(stop=False)
        torch.cuda.synchronize()
        most.append(torch.cuda.max_memory_allocated() - before)
        engine = job.trainer.engine
        assert isinstance(engine, PipelineEngine)
        if words:
            assert isinstance(engine.parts.host, HostActivations) and engine.parts.host.buffers.nbytes > 0
        del job, engine
    assert most[1] < 0.7 * most[0], most
