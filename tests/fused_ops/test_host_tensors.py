"""Memory of tensors in the host's heap: what a freed one leaves fits the next of its size, and torch finds all else as
its own. In processes of their own, since a process keeps what it has taken.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fused_ops.native import library
from megazero.system.allocator import VARIABLE, settings

TAKEN = """
import torch
from fused_ops.native import library
if {taken}:
    library.torch_library("auto").call("take_host_tensors")
"""
AGAIN = f"""{TAKEN}
def tensors():
    between, large = [], []
    for _ in range(50):
        large.append(torch.empty(1 << 18))
        between.append(torch.empty(1 << 10))
    return between, large

between, large = tensors()
highest = max(tensor.data_ptr() for tensor in large)
large.clear()
large += [torch.empty(1 << 18) for _ in range(50)]
print(sum(tensor.data_ptr() > highest for tensor in large))
"""
USED = f"""{TAKEN}
from torch.profiler import ProfilerActivity, profile

assert torch.empty(0).data_ptr() == 0 and torch.empty(0).numel() == 0
for size in (1, 7, 1000, 1 << 20):
    tensor = torch.full((size,), 3.0)
    assert tensor.data_ptr() % 64 == 0
    grown = tensor.resize_(2 * size)
    assert grown.data_ptr() % 64 == 0 and bool((grown[:size] == 3.0).all())
    assert (grown.numpy()[:size] == 3.0).all()
try:
    torch.empty(1 << 56)
except RuntimeError as error:
    assert "can't allocate memory: you tried to allocate 288230376151711744 bytes" in str(error), error
else:
    raise AssertionError("there is no such memory")
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
    kept = torch.ones(1 << 16)
print(sum(event.self_cpu_memory_usage for event in traced.key_averages()))
"""


def printed(code: str, *, taken: bool) -> int:
    """The number that a process prints whose tensors are in such memory, or in torch's own."""
    if library.torch_library("auto") is None:
        pytest.skip("no compiler")
    command = [sys.executable, "-c", code.format(taken=taken)]
    environment = {**os.environ, VARIABLE: settings()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc")
def test_a_tensor_takes_the_hole_of_another_of_its_size() -> None:
    # of 50 tensors 0 or 1 lie elsewhere, where an object of a few bytes was cut off a hole; of torch's own 30 to 49
    assert printed(AGAIN, taken=True) < 5
    assert printed(AGAIN, taken=False) > 15, "torch's own tensors do it too: these are not needed"


@pytest.mark.parametrize("taken", [True, False])
def test_torch_finds_what_it_finds_of_its_own(taken: bool) -> None:
    assert printed(USED, taken=taken) == 4 << 16
