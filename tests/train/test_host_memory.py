"""The heap of a run that keeps something on disks: it holds no more than the account, whatever holes a step leaves."""

import os
import platform
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from megazero.pipeline.engine import PipelineEngine
from megazero.system import device as devices
from megazero.system.allocator import VARIABLE, settings
from tests.parity.training import job_on_rank
from tests.plan.test_step_memory import MODEL
from tests.ranks import run_ranks

MICRO_BATCHES = 4
"""Of `MODEL`."""
BLOCK, BLOCKS, ACCOUNT = 1 << 20, 400, 200 << 20
"""Every other block is freed, so that half of them is the account."""
CODE = f"""
import torch

from megazero.system import device as devices
from megazero.train.run_memory import HostMemory

cpu = torch.device("cpu")
memory = HostMemory(cpu, {{account}})
before = devices.memory_bytes(cpu)
blocks = [torch.ones({BLOCK}, dtype=torch.uint8) for _ in range({BLOCKS})]
del blocks[::2]
print(devices.memory_bytes(cpu) - before)
memory.computed()
print(devices.memory_bytes(cpu) - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
@pytest.mark.parametrize(("account", "returned"), [(ACCOUNT, True), (4 * ACCOUNT, False)])
def test_holes_of_the_heap_return_to_the_system_above_the_account(account: int, returned: bool) -> None:
    command = [sys.executable, "-c", CODE.replace("{account}", str(account))]
    environment = {**os.environ, VARIABLE: settings()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    with_holes, after = (int(word) / (BLOCK * BLOCKS) for word in done.stdout.split())
    assert with_holes > 0.9, "the holes did not stay in the heap"
    assert after == pytest.approx(0.5 if returned else with_holes, abs=0.1)


def returns_on_rank(rank: int, flags: list[str]) -> tuple[int, int, int, int]:
    """How many computations a step has, and how often it returns free memory: where more is held each time, far above
    the account, where nothing of that comes back, and where less is held.
    """
    job, _ = job_on_rank(rank, 1, flags)
    assert isinstance(job.trainer.engine, PipelineEngine)
    computations = sum(i.is_compute for i in job.trainer.engine.lists.training(MICRO_BATCHES))
    returned, growing = list[None](), (1 << exponent for exponent in count(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "return_free_memory", lambda _: returned.append(None))
        numbers = list[int]()
        for held in (lambda _: next(growing), lambda _: 1 << 900, lambda _: 0):
            patch.setattr(devices, "memory_bytes", held)
            job.trainer.train_step(stop=False)
            numbers.append(len(returned) - sum(numbers))
    job.state.model.tiers.close()
    above, in_use, below = numbers
    return computations, above, in_use, below


@pytest.mark.parametrize(
    ("words", "returns"),
    [
        ("--offload-params nvme --offload-gradients nvme --offload-optimizer nvme", True),
        ("--offload-activations nvme --num-layers 8", True),
        ("--offload-params cpu --offload-optimizer cpu", False),
    ],
)
def test_a_step_with_something_on_disks_looks_at_its_memory_after_each_computation(
    words: str, returns: bool, corpus: Path, tmp_path: Path
) -> None:
    data = f"--data-path {corpus} --data-cache-path {tmp_path} --nvme-buffer-bytes 400KB"
    folder = f"--nvme-path {tmp_path}" if "nvme" in words else ""
    ((computations, above, in_use, below),) = run_ranks(1, returns_on_rank, f"{MODEL} {data} {words} {folder}".split())
    assert computations > 0 and (above, in_use, below) == ((computations, 1, 0) if returns else (0, 0, 0))
