"""The program that compute-sanitizer runs leaves no CUDA kernel out."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from fused_ops.native import library
from tests.gpu.sanitize import run


@pytest.mark.slow
def test_every_kernel_is_run(monkeypatch) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm, which lists the functions of a library")
    monkeypatch.setenv("MEGAZERO_FUSED", library.EMULATED)
    found = library.cpu_library(library.EMULATED)
    assert found is not None
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(found.path)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines() if " T " in line}
    exported = {name for name in names if not name.startswith("_")} - {"error_text", "cuda_versions"}
    assert len(exported) > 80
    assert exported - set(run(torch.device("cpu"))) == set()
