"""What the tests of the kernels share: every instruction set level of the machine, drawn numbers, and bounds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fused_ops.native import library
from fused_ops.native.compile import LEVELS

HERE = list(LEVELS)[list(LEVELS).index(library.level()) :] if library.level() in LEVELS else ["generic"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=HERE)
def level(request, monkeypatch) -> Iterator[str]:
    """The kernels of one level; skipped where there is no compiler.

    One thread: what a kernel does with more is a test of its own, and threads that wait for each other on a busy machine take long.
    """
    threads = torch.get_num_threads()
    monkeypatch.setenv("MEGAZERO_FUSED", request.param)
    found = library.cpu_library(request.param)
    if found is None:
        pytest.skip("no compiler, no kernels")
    assert found.level == request.param
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, exact: Tensor, slack: float = 1.0, size: float = 0.0) -> None:
    """Within one rounding of the dtype plus `slack` times fp32's error of a short computation, relative to the largest value.

    size: that of the terms, where they cancel.
    """
    assert found.shape == exact.shape
    size = max(size, exact.abs().max().item() if exact.numel() else 0.0)
    own = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0.0
    smallest = torch.finfo(found.dtype).smallest_normal if found.dtype == torch.float16 else 0.0
    error = (found.double() - exact).abs() - own * 1.01 * exact.abs() - smallest * torch.finfo(found.dtype).eps
    assert error.max().item() <= slack * 3e-6 * size if found.numel() else True, f"{error.max().item()} of {size}"


def same_kind(found: Tensor, reference: Tensor) -> bool:
    """Whether NaN, inf and -inf stand in the same places."""
    return all(torch.equal(kind(found), kind(reference)) for kind in (torch.isnan, torch.isposinf, torch.isneginf))
