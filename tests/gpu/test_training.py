"""Training on a card equals training on the CPU, up to bf16's rounding: one rank over NCCL, and four ranks that share
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.system.device import cuda_available
from tests.e2e.command import metrics, relative, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

MODEL = ["--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 64, "--vocab-size", 1003]
STEPS = ["--train-iters", 20, "--micro-batch-size", 2, "--global-batch-size", 8, "--lr", 1e-3, "--eval-iters", 0]
LAYOUTS = {
    "nccl-1": (1, ["--tp", 1]),
    "gloo-tp2-pp2-zero1": (4, ["--tp", 2, "--pp", 2, "--zero-stage", 1, "--backend", "gloo"]),
    "gloo-tp2-dp2-zero2-sp": (4, ["--tp", 2, "--zero-stage", 2, "--sequence-parallel", "--backend", "gloo"]),
}


def losses(ranks: int, flags: list[object], path: Path) -> tuple[list[float], list[float]]:
    run(ranks, [*flags, "--metrics-file", path], launcher=True)
    lines = metrics(path)
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp32", 1e-3)])
def test_cuda_equals_cpu(name: str, precision: str, tolerance: float, tmp_path: Path, corpus: Path) -> None:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--precision", precision]
    ranks, layout = LAYOUTS[name]
    cpu, cpu_norms = losses(1, [*MODEL, *STEPS, *data, "--device", "cpu"], tmp_path / "cpu")
    gpu, gpu_norms = losses(ranks, [*MODEL, *STEPS, *data, *layout, "--device", "cuda"], tmp_path / "gpu")
    assert relative(gpu, cpu) < tolerance
    assert relative(gpu_norms, cpu_norms) < 5 * tolerance
