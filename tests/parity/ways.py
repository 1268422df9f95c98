"""What a run of a test is beside its flags: how its ranks communicate, how fast threads are, and which steps fail."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero.data.loader import Loader
from megazero.model.batch import MicroBatch
from megazero.mpu.fp8 import Fp8
from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.grid import Group
from megazero.mpu.parameter import Parameter
from megazero.system import device as devices
from megazero.train.job import Job
from megazero.train.trainer import Trainer
from megazero.zero.memories import Tiers
from tests.late import late_collectives
from tests.unwritten import unwritten_memory_is_nan

FP16 = "--precision fp16 --hysteresis 1 --loss-scale-window 2 --initial-loss-scale 1048576"
"""The scale doubles after two steps, and then it overflows."""
UNTIED = "--untie-embeddings-and-output-weights"


@dataclass(frozen=True)
class Way:
    """How ranks run. Only `masked` and `infinite` may change a number.

    as_nccl   gloo carries what the program does with NCCL: every group connected before the first step, a warm-up,
              channels of two ranks, and flat reduce-scatters
    late      results of collectives come as late as they may (`tests.late`)
    delays    seed of delays on every lane of model state; None: no delays
    copies    copies of FP8 weights stay, as where no parameters are gathered
    unwritten memory that nobody has written holds NaN (`tests.unwritten`)
    masked    batches have masks that leave very unequal numbers of predictions
    eager     early updates are tried behind clipped steps too, so that most are made again
    apart     what an update in host memory exchanges with the device is copied, as where these are two memories
    infinite  steps in which a gradient of the last rank is infinite
    """

    as_nccl: bool = False
    late: bool = False
    delays: int | None = None
    copies: bool = False
    unwritten: bool = False
    masked: bool = False
    infinite: frozenset[int] = frozenset()
    apart: bool = False
    eager: bool = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """The context in which a rank builds its job and trains."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            if self.as_nccl:
                patch.setattr(Group, "is_on_host", False)
            if self.apart:
                patch.setattr(devices, "shares_host_memory", lambda kind: False)
            if self.eager:
                # But for the first step of a process: with whole steps none is there to go back to.
                of_first = property(lambda self: self.steps_here == 0, lambda self, value: None)
                patch.setattr(Trainer, "was_clipped", of_first)
            if self.copies:
                kept = property(lambda self: True, lambda self, value: None)
                patch.setattr(Fp8, "keeps_weights", kept, raising=False)
            if self.unwritten:
                stack.enter_context(unwritten_memory_is_nan())
            calls = stack.enter_context(late_collectives()) if self.late else [1]
            yield
            assert calls, "no collective has been late"

    def begin(self, job: Job, rank: int) -> None:
        """Change a job that has been built."""
        if self.masked:
            mask(job.trainer.batches.train)
        if self.infinite and rank == job.grid.world.size - 1:
            spoil(job, self.infinite)
        if self.delays is not None:
            delay(job.state.model.tiers, random.Random(1000 * self.delays + rank))


PLAIN = Way()


def mask(loader: Loader[MicroBatch]) -> None:
    """Have batches with very unequal numbers of predictions: every second sample of a step has none, and the first one.

    With micro-batches of one sample and an even number of replicas, some of these have nothing to learn.
    """
    load = loader.micro_batches

    def micro_batches(consumed_samples: int, global_batch: int) -> list[MicroBatch]:
        made = []
        for batch in load(consumed_samples, global_batch):
            counts = torch.ones_like(batch.labels, dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
            numbers = (batch.samples - consumed_samples)[:, None]
            first = torch.arange(counts.shape[1]) == 0
            made.append(replace(batch, loss_mask=counts & (numbers % 2 == 0) & ((numbers > 0) | first)))
        return made

    loader.micro_batches = micro_batches  # type: ignore[method-assign]


class InfAt:
    """The gradient target of a parameter that makes some steps' gradients infinite, or of another value."""

    def __init__(self, job: Job, target: GradientTarget, steps: Set[int], value: float) -> None:
        self.job, self.target, self.steps, self.value = job, target, steps, value

    def add(self, write: Write) -> None:
        """What `mpu.gradient.GradientTarget.add` does, and then perhaps the fault."""

        def write_and_spoil(into: Tensor, add: bool) -> None:
            write(into, add)
            if self.job.trainer.position.iteration + 1 in self.steps:
                into.fill_(self.value)

        self.target.add(write_and_spoil)


def spoil(job: Job, steps: Set[int], value: float = math.inf) -> None:
    """Have the last matrix of this rank make these steps' gradients infinite, or of this value."""
    matrices = [p for p in nn.ModuleList(job.stages).parameters() if isinstance(p, Parameter) and p.dim() == 2]
    trained = [matrix for matrix in matrices if matrix.gradient_target is not None]
    trained[-1].gradient_target = InfAt(job, trained[-1].gradient_target, steps, value)


def delay(tiers: Tiers, chance: random.Random) -> None:
    """Have some of what lanes do take longer."""

    def slow(lane: Any) -> None:
        submit = lane.submit

        def after_a_while(work: Callable[..., Any], *rest: Any, **more: Any) -> Any:
            sleep(chance.choice((0, 0, 0.004)))
            return work(*rest, **more)

        lane.submit = lambda work, *rest, **more: submit(after_a_while, work, *rest, **more)

    copies: tuple[Any, Any] = tiers.to_host, tiers.to_device
    for lane in (*(each._thread for each in copies), tiers.host_updates):
        slow(lane)
