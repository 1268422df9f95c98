"""The model and the contestants of a comparison, as plain values that are sent to a child process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Settings that glibc's manual suggests for a training job: huge pages, and freed memory that is kept for reuse.
TUNED = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
}


@dataclass(frozen=True)
class Workload:
    """A model and its batch. All contestants use AdamW and clipping.

    precision      "bf16" has bf16 products and fp32 master weights; "fp32", which not all contestants know, is for
                   processors without bf16 products
    micro_batch    samples of one forward pass
    micro_batches  forward passes of one optimizer step on one data-parallel rank
    threads        of one rank
    device         cpu or cuda
    """

    name: str
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    sequence: int = 512
    vocabulary: int = 8192
    micro_batch: int = 4
    micro_batches: int = 1
    ranks: int = 1
    threads: int = 2
    device: str = "cpu"
    precision: str = "bf16"
    lr: float = 3e-4
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    @property
    def samples(self) -> int:
        """Samples of one step on one data-parallel rank."""
        return self.micro_batch * self.micro_batches


@dataclass(frozen=True)
class Entry:
    """A contestant with its settings.

    module       file in `bench/contestants`
    settings     keyword arguments of its `build`
    environment  environment variables of its processes, besides those of this one
    replicas     number of data-parallel replicas
    note         a description of its settings
    """

    name: str
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=lambda: dict(TUNED))
    replicas: int = 1
    note: str = ""

    def tokens(self, work: Workload) -> int:
        """The tokens of one optimizer step, of all ranks together."""
        return work.samples * work.sequence * self.replicas


def to_json(value: Workload | Entry) -> str:
    return json.dumps(asdict(value))


def workload_from(text: str) -> Workload:
    return Workload(**json.loads(text))


def entry_from(text: str) -> Entry:
    return Entry(**json.loads(text))


def random_tokens(work: Workload, count: int, seed: int) -> Tensor:
    """`count` samples of uniformly drawn ids, int64 [count, s + 1]."""
    draws = np.random.default_rng(seed).integers(0, work.vocabulary, (count, work.sequence + 1), dtype=np.int64)
    return torch.from_numpy(draws)


class Batches:
    """A few micro-batches in turn, in the device's memory: tokens and labels, int64 [b, s]."""

    def __init__(self, work: Workload, replica: int = 0, different: int = 8) -> None:
        samples = random_tokens(work, different * work.micro_batch, seed=17 + replica).to(work.device)
        self.all = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in samples.split(work.micro_batch)]
        self.next = 0

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.next += 1
        return self.all[self.next % len(self.all)]
