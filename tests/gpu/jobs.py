"""A job on the GPU, in this process, and the comparison of two of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megazero.config.parse import parse_run
from megazero.data.progress import silent
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import ProcessGrid, build_grid
from megazero.system import device as devices
from megazero.telemetry.record import StepRecord
from megazero.train.job import Job, build_job
from megazero.train.prepare import prepare
from tests.parameters import values_of
from tests.parity.training import Recorder, data_flags

# torch reads this variable once, before the first product. Without it torch would refuse the deterministic tests, if
# other tests of this process run first.
os.environ.setdefault(*devices.CUBLAS_WORKSPACE)

MODEL = "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 128 --vocab-size 1003".split()


def flags_of(flags: list[str], corpus: Path, cache: Path) -> list[str]:
    """The flags of the small model on the GPU and of its data."""
    return [*MODEL, *flags, "--device", "cuda", *data_flags(corpus, cache)]


def job_on_card(flags: list[str], grid: ProcessGrid | None = None) -> tuple[Job, Recorder]:
    """As the program builds it, with a recorder instead of its log. grid: default that of a world without process
    groups.
    """
    run = parse_run(flags, 1)
    prepared = prepare(run, 1, silent)
    job = build_job(prepared, grid or build_grid(axes_of(prepared.run, 1), devices.resolve("cuda", 0)))
    recorder = Recorder()
    job.trainer.log._sinks = (recorder,)
    return job, recorder


@dataclass
class Outcome:
    """The results of one run: records and final weights."""

    records: list[StepRecord]
    weights: dict[str, Tensor]

    def series(self, key: str) -> list[str]:
        """A number of every step, as text: NaN equals NaN."""
        return [repr(getattr(record, key)) for record in self.records]


def train(flags: list[str], grid: ProcessGrid | None = None) -> Outcome:
    """To the end."""
    job, recorder = job_on_card(flags, grid)
    job.fit()
    job.state.model.wait_parameters()
    return Outcome(recorder.records, {piece.spec.name: piece.values for piece in values_of(nn.ModuleList(job.stages))})


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    """To the bit."""
    for key in ("iteration", "loss", "grad_norm", "loss_scale", "skipped", "global_batch_size"):
        assert ours.series(key) == theirs.series(key), key
    assert ours.weights.keys() == theirs.weights.keys()
    different = [name for name, value in theirs.weights.items() if not torch.equal(ours.weights[name], value)]
    assert not different, different


@contextmanager
def deterministic_again() -> Iterator[None]:
    """Restore torch's setting of deterministic algorithms, which --deterministic changes for the process."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
