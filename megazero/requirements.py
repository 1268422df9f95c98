"""What a run asks of the machine and the installation, looked at before anything is started."""

from __future__ import annotations

from fused_ops import apex, fp8
from megazero import device as devices
from megazero.config.schema import Run


def unmet(run: Run) -> list[str]:
    """What this run would fail with here, each with its flag."""
    kind = devices.kind(run.parallel.device)
    on_cuda = kind == "cuda"
    problems = []
    if run.parallel.cuda_graphs and not on_cuda:
        problems.append("--cuda-graphs: torch finds no CUDA device here, and --device auto is the CPU")
    if run.optimizer.optimizer_impl == "apex":
        missing = apex.why_not() if on_cuda else "torch finds no CUDA device here, and it has kernels for nothing else"
        problems += [] if missing is None else [f"--optimizer-impl apex: {missing}"]
    if run.optimizer.fp8 != "off":
        missing = fp8.why_not(kind)
        problems += [] if missing is None else [f"--fp8 {run.optimizer.fp8}: {missing}; the same run without it computes in bf16"]
    if run.trainer.deterministic and on_cuda:
        wrong = devices.why_not_deterministic()
        problems += [] if wrong is None else [f"--deterministic: {wrong}"]
    return problems
