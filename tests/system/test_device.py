"""The device room: memory is measured, cards are known by name."""

import mmap

import numpy as np
import pytest
import torch

from megazero.system import device

CPU = torch.device("cpu")


def test_cpu_is_always_there() -> None:
    assert device.resolve("cpu", 3) == CPU
    device.synchronize(CPU)
    assert device.name(CPU)
    assert device.peak_flops(CPU, torch.bfloat16) is None


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="--device tpu"):
        device.resolve("tpu", 0)


@pytest.mark.skipif(device.cuda_available(), reason="there is a CUDA device")
def test_cuda_without_a_card_is_refused() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        device.resolve("cuda", 0)
    assert device.resolve("auto", 0) == CPU


def test_peak_memory_sees_what_was_freed() -> None:
    """Fresh pages, as many as bring this process 64 MiB above its peak so far: earlier tests may have taken more."""
    before = device.peak_memory_bytes(CPU)
    fresh = mmap.mmap(-1, before - device.memory_bytes(CPU) + (64 << 20))
    np.frombuffer(fresh, np.uint8).fill(1)
    held = device.peak_memory_bytes(CPU)
    assert held - before > 60 << 20
    fresh.close()
    assert device.peak_memory_bytes(CPU) > held - (4 << 20)  # the kernel's counters lag a little
    assert device.memory_bytes(CPU) < held - (32 << 20)


@pytest.mark.parametrize(
    ("card", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H200", torch.float16, 989),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("a card nobody knows", torch.bfloat16, None),
    ],
)
def test_peaks_by_card(card: str, dtype: torch.dtype, teraflops: float | None) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert device.card_peak_flops(card, dtype) == expected


def test_free_memory_is_returned() -> None:
    """Holes between live tensors go back to the system."""
    here = torch.device("cpu")
    tensors = [torch.ones(20_000) for _ in range(3000)]  # 80 kB each: on the heap, not mapped one by one
    del tensors[::2]
    before = device.memory_bytes(here)
    device.return_free_memory(here)
    assert device.memory_bytes(here) < before - 50_000_000
