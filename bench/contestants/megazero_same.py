"""megazero with the weights and the batches of its peers, so that their losses can be compared."""

from __future__ import annotations

import torch

from bench.contestants.common import Step, rank
from bench.contestants.megazero_ import build_megazero, step_of
from bench.workload import Batches, Workload
from megazero.data.loader import Loader
from megazero.model.batch import MicroBatch


def share_batches(loader: Loader[MicroBatch], work: Workload, replica: int) -> None:
    """Let the loader return the peers' micro-batches of this replica."""
    batches = Batches(work, replica)

    def micro_batches(consumed_samples: int, global_batch: int) -> list[MicroBatch]:
        numbers = torch.arange(work.micro_batch)
        return [MicroBatch(*batches(), None, numbers) for _ in range(work.micro_batches)]

    loader.micro_batches = micro_batches  # type: ignore[method-assign]


def build(work: Workload, start: str, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    """start: folder with the weights, in the format of `transformers`. Every rank is a replica."""
    job = build_megazero(work, [*layout, "--init-from", start], replicas)
    share_batches(job.trainer.batches.train, work, rank())
    return step_of(job.trainer)
