"""Shared parts of the kernels' tests: the levels (instruction sets) of the machine, random numbers, and error bounds.

The CUDA kernels are two of the levels: emulated on the CPU, which runs all of their code, and on a GPU.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.native import library
from fused_ops.native.compile import LEVELS

CARDS = [pytest.param("CUDA", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
"""Without a card these are no cases: they were a thousand skips. `tests/gpu` says what is skipped."""
CPU_LEVELS = list(LEVELS)[list(LEVELS).index(library.level()) :]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[*CPU_LEVELS, library.EMULATED, *CARDS])
def level(request, monkeypatch) -> Iterator[str]:
    """The kernels of one level; the test is skipped without a compiler. The default device is the level's."""
    yield from _of_level(request, monkeypatch)


@pytest.fixture(params=CPU_LEVELS)
def cpu_level(request, monkeypatch) -> Iterator[str]:
    """As `level`, for kernels that only CPUs have."""
    yield from _of_level(request, monkeypatch)


@pytest.fixture(params=[library.EMULATED, *CARDS])
def cuda_level(request, monkeypatch) -> Iterator[str]:
    """As `level`, for properties of CUDA kernels only."""
    yield from _of_level(request, monkeypatch)


def _of_level(request, monkeypatch) -> Iterator[str]:
    """Use one thread. More threads have a test of their own, and are slow when they wait for each other on a busy
    machine.
    """
    if request.param == "CUDA":
        found = library.cuda_library("auto", torch.cuda.current_device())
        assert found is not None, "the machine has a card and no kernels for it"
        with torch.device("cuda"):
            yield "CUDA"
        return
    threads = torch.get_num_threads()
    monkeypatch.setenv("MEGAZERO_FUSED", request.param)
    found = library.cpu_library(request.param)
    if found is None:
        pytest.skip("no compiler, no kernels")
    assert found.level.startswith(request.param)
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed, the same on every device."""
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device()).to(dtype)


def surrounded(values: Tensor) -> Tensor:
    """An equal tensor between two stretches of NaN, each longer than any vector: what reads beyond it reads NaN."""
    beyond = 256
    memory = torch.full((values.numel() + 2 * beyond,), torch.nan, dtype=values.dtype, device=values.device)
    return memory[beyond:-beyond].view(values.shape).copy_(values)


def still_surrounded(values: Tensor) -> bool:
    """Whether the stretches around a tensor of `surrounded` are NaN still: nothing was written beyond it."""
    whole, first = values._base, values.storage_offset()
    assert whole is not None and first > 0
    return bool(whole[:first].isnan().all() and whole[first + values.numel() :].isnan().all())


def scalar(value: float) -> Tensor:
    """A number as optimizers take it."""
    return torch.tensor(value, dtype=torch.float64)


def adam_settings(step: float = 3.0, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of one step of Adam."""
    found: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    found |= {"decoupled": True, "multiplier": scalar(0.7), "skip": torch.tensor(False), "step": scalar(step)}
    return found | changes


def sgd_settings(**changes: Any) -> dict[str, Any]:
    """Keyword arguments of one step of SGD."""
    found: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    return found | {"multiplier": scalar(0.7), "skip": torch.tensor(False)} | changes


def integers(first: int, stop: int, shape: tuple[int, ...], seed: int = 1) -> Tensor:
    """int64 in [first, stop), the same on every device."""
    values = torch.randint(first, stop, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device())


SHORT = 1 / 16
"""The allowed error, before rounding, of functions that are computed for 16 bits, in units of that rounding."""


def assert_close(
    found: Tensor, exact: Tensor, slack: float = 1.0, size: float = 0.0, terms: Tensor | None = None
) -> None:
    """Assert that `found` is within one rounding of the dtype plus `slack` times fp32's error of a short computation,
    relative to the largest value.

    size: the size of terms that cancel. terms: the size of each term that comes from functions of SHORT precision.
    """
    assert found.shape == exact.shape
    size = max(size, exact.abs().max().item() if exact.numel() else 0.0)
    own = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0.0
    smallest = torch.finfo(found.dtype).smallest_normal if found.dtype == torch.float16 else 0.0
    error = (found.double() - exact).abs() - own * 1.01 * exact.abs() - smallest * torch.finfo(found.dtype).eps
    if terms is not None:
        error -= own * SHORT * terms.double().abs()
    assert error.max().item() <= slack * 3e-6 * size if found.numel() else True, f"{error.max().item()} of {size}"


def the_same_for_any_threads(run: Callable[[], Iterable[Tensor]], counts: tuple[int, ...] = (1, 2, 3, 5)) -> None:
    """Assert that the bits of the result of `run` do not depend on the number of threads."""
    before, first = torch.get_num_threads(), None
    try:
        for count in counts:
            torch.set_num_threads(count)
            found = list(run())
            first = first or found
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, found, strict=True)), f"{count} threads"
    finally:
        torch.set_num_threads(before)


def exported(path: Path) -> set[str]:
    """C functions of ours that a library offers."""
    words = [
        shutil.which("nm") or pytest.skip("no nm, which lists the functions of a library"),
        "-D",
        "--defined-only",
        str(path),
    ]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines() if line.split()[-2] == "T"}
    return {name for name in names if not name.startswith("_")}


def same_kind(found: Tensor, reference: Tensor) -> bool:
    """Whether NaN, inf and -inf are at the same indices."""
    return all(torch.equal(kind(found), kind(reference)) for kind in (torch.isnan, torch.isposinf, torch.isneginf))
