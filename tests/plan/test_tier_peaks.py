"""The peaks of every tier by arithmetic beside what a run allocates there: on the device, in host memory, on disks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from bench.contestants.megazero_meter import in_host_memory
from megazero.plan.tier_peaks import run_peaks
from tests.plan.test_step_memory import MODEL, metered_job
from tests.ranks import run_ranks

NVME = "--nvme-path {disk} --nvme-buffer-bytes 400KB"
COMBINATIONS = (
    (1, "--offload-optimizer cpu --nvme-buffer-bytes 200KB --global-batch-size 2"),
    (2, "--offload-optimizer cpu:0.4 --zero-stage 2 --precision bf16 --global-batch-size 4"),
    (2, "--offload-optimizer cpu:0.7 --zero-stage 1 --precision fp32 --late-update --global-batch-size 4"),
    (1, f"--offload-optimizer nvme {NVME} --global-batch-size 2"),
    (2, f"--offload-optimizer nvme:0.5 {NVME} --zero-stage 3 --late-update --global-batch-size 4"),
    (1, "--offload-activations cpu --global-batch-size 2"),
    (2, "--offload-activations cpu:0.5 --zero-stage 3 --global-batch-size 8 --recompute-granularity selective"),
    (1, "--offload-optimizer cpu:0.6 --offload-activations cpu --global-batch-size 2 --recompute-granularity full"),
    (2, f"--offload-optimizer nvme {NVME} --offload-activations cpu --pp 2 --global-batch-size 4"),
    (1, f"--offload-activations nvme {NVME} --global-batch-size 4 --num-layers 8"),
    (2, f"--offload-optimizer nvme --offload-activations nvme:0.6 {NVME} --zero-stage 2 --global-batch-size 6"),
    (2, f"--offload-optimizer nvme:0.8 {NVME} --offload-activations cpu:0.7 --tp 2 --optimizer sgd"),
    (1, "--offload-gradients cpu --offload-optimizer cpu:0.6 --nvme-buffer-bytes 200KB --global-batch-size 4"),
    (2, "--offload-gradients cpu:0.5 --nvme-buffer-bytes 200KB --zero-stage 3 --late-update --global-batch-size 8"),
    (2, f"--offload-gradients nvme {NVME} --zero-stage 1 --tp 1 --global-batch-size 6"),
    (1, f"--offload-gradients nvme --offload-params nvme --offload-optimizer nvme {NVME} --global-batch-size 4"),
    (2, f"--offload-gradients nvme:0.5 --offload-optimizer cpu {NVME} --pp 2 --late-update --global-batch-size 4"),
)


class Tiers(NamedTuple):
    """Bytes of a rank."""

    device: int
    host: int
    disk: int


def tiers_on_rank(rank: int, size: int, flags: list[str]) -> tuple[Tiers, Tiers]:
    """What a rank has taken of each tier, and what it should take."""
    job, most, files = metered_job(rank, size, flags)
    host, seen = in_host_memory(job)
    planned = run_peaks(job.run, job.grid.axes, "cpu").of(job.grid.at.pp)
    return Tiers(most - seen, host, files), Tiers(planned.device_bytes, planned.host_bytes, planned.disk)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), COMBINATIONS, ids=[words for _, words in COMBINATIONS])
def test_every_tier_takes_what_is_planned(ranks: int, words: str, corpus: Path, tmp_path: Path) -> None:
    """The device's to 2 %, host memory up to the alignment of its pieces, files to the byte."""
    data = ["--data-path", str(corpus), "--data-cache-path", str(tmp_path)]
    flags = [*MODEL.split(), *data, *words.format(disk=tmp_path).split()]
    for rank, (found, planned) in enumerate(run_ranks(ranks, tiers_on_rank, ranks, flags)):
        assert found.device == pytest.approx(planned.device, rel=0.02), (rank, found, planned)
        assert planned.host == pytest.approx(found.host, rel=0.01) and planned.host, (rank, found, planned)
        assert found.disk == planned.disk and (found.disk > 0) == ("--nvme-path" in words), (rank, found, planned)
