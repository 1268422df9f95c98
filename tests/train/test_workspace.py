"""What matrix products take for themselves: beside it a plan holds whatever library a processor has, and --placement
auto keeps to its budget.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.contestants.megazero_meter import Meter
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.mpu.axes import axes_of
from megazero.plan.step_memory import run_peaks
from megazero.plan.step_times import read_rates
from megazero.train.measured_rates import product_workspace
from megazero.train.placed import chosen
from tests.parity.training import data_flags, job_on_rank
from tests.ranks import run_ranks

WIDE = "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 4096"
"""Fullest in the head's products, for which oneDNN takes about as much as the activations of the block."""
NUMBERS = "--micro-batch-size 1 --global-batch-size 2 --train-iters 3"
CPU = torch.device("cpu")


def metered_on_rank(rank: int, size: int, flags: list[str]) -> tuple[int, int, int]:
    """The most that torch's allocator holds in a step, what is planned of tensors, and the workspace of products."""
    meter = Meter()
    job, _ = job_on_rank(rank, size, flags)
    meter.end("built")
    for number in range(3):
        job.trainer.train_step(stop=False)
        meter.end(f"step {number}")
    planned = run_peaks(job.run, job.grid.axes, "cpu")[0].device_bytes
    return meter.peaks.phases["step 2"]["peak"], planned, product_workspace(job.run, CPU)


MODELS = {
    "head": WIDE,
    "attention": "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --vocab-size 1003 "
    "--attention-dropout 0.1",
    "gated": f"{WIDE} --activation swiglu --ffn-hidden-size 1408 --vocab-size 1003",
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_step_takes_what_is_planned_and_no_more_than_the_workspace(
    precision: str, model: str, corpus: Path, tmp_path: Path
) -> None:
    flags = [*MODELS[model].split(), *NUMBERS.split(), *data_flags(corpus, tmp_path), "--precision", precision]
    ((found, planned, workspace),) = run_ranks(1, metered_on_rank, 1, flags)
    assert planned * 0.99 < found <= planned * 1.001 + workspace, (found, planned, workspace)
    assert workspace == 0 or model == "gated" or found > planned * 1.001, "it is fullest in a product"
    assert precision != "fp32" or workspace == 0


RATES = "flops: 1e11\nto_host: 10GB\nto_device: 10GB\nupdate: 40GB\nupdate_host: 2GB\n"


@pytest.mark.slow
def test_a_search_leaves_the_workspace_free(tmp_path: Path) -> None:
    """By the rates of a file: what fits beside 400 KB of products is what fits into a budget without them."""

    def told(workspace: int, budget: int) -> tuple[object, str]:
        file = tmp_path / "rates.yaml"
        file.write_text(f"{RATES}workspace: {workspace}\n")
        given = ["--placement", "auto", "--placement-rates", str(file), "--device-memory-budget", str(budget)]
        given += ["--host-memory-budget", "1GB"]
        given += ["--nvme-buffer-bytes", "100MB"]  # few parts, each of which is an instruction of every simulated step
        run: Run = parse_run([*WIDE.split(), *NUMBERS.split(), "--data-path", "x", *given], 1)
        found = chosen(run, axes_of(run, 1), "cpu", read_rates(str(file)), None, nccl=False)
        return found.settings, " ".join(found.told)

    (settings, said), (alone, without) = told(400_000, 32_000_000), told(0, 31_600_000)
    assert settings == alone != told(0, 32_000_000)[0]
    assert "391 KiB of products, fullest" in said and "products" not in without
    assert "workspace: 400000" in said
