"""The program that compute-sanitizer runs leaves no CUDA kernel out."""

from __future__ import annotations

import pytest
import torch

from fused_ops.native import library
from fused_ops.native.cuda import CudaLibrary
from tests.fused_ops.levels import exported
from tests.gpu.sanitize import run


@pytest.mark.slow
def test_every_kernel_is_run(monkeypatch) -> None:
    """By what is asked for; no kernel computes here."""
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    monkeypatch.setattr(CudaLibrary, "call", lambda self, name, *arguments: None)
    found = library.cpu_library(library.EMULATED)
    assert found is not None
    kernels = exported(found.path) - {"error_text", "cuda_versions"}
    assert len(kernels) > 80 and kernels - set(run(torch.device("cpu"))) == set()
