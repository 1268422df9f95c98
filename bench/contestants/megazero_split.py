"""megazero's step, with a clock that assigns all time to exactly one part at a time.

forward and backward are those of the layers. loss is forward and backward of the head: its norm, its product with the
vocabulary, the cross-entropy. communication is the time in which a rank waits for a message, without what overlaps with
computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.contestants.megazero_ import PRECISIONS, build_megazero
from bench.workload import Workload
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.p2p import Channels
from megazero.train.job import Job

__all__ = ["PARTS", "PRECISIONS", "build"]

PARTS = ("forward", "backward", "loss", "optimizer", "communication", "other")


class Clock:
    """Seconds of each part, on one thread. `switch` starts a part and returns the one before."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.now, self.since, self.thread = "other", time.perf_counter(), threading.get_ident()

    def switch(self, part: str) -> str:
        if threading.get_ident() != self.thread:
            return part
        before, now = self.now, time.perf_counter()
        self.seconds[before] += now - self.since
        self.now, self.since = part, now
        return before

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, wrapped so that its time counts for `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return timed


def attach(clock: Clock, job: Job) -> None:
    """Wrap the parts of this job with the clock. Within the engine, all that is not a layer's forward is backward."""
    spots: list[tuple[Any, str, str]] = [
        (job.trainer.engine, "train", "backward"),
        (job.state.optimizer, "update", "optimizer"),
        (job.state.optimizer, "sum_of_squares", "optimizer"),
    ]
    spots += [(stage, "forward", "forward") for stage in job.stages]
    spots += [(kind, "wait", "communication") for kind in (CommunicationHandle, *CommunicationHandle.__subclasses__())]
    spots += [(Channels, "flush", "communication")]
    for stage in job.stages:
        if stage.head is not None:
            stage.head.forward = _with_backward(clock, clock.around("loss", stage.head.forward))  # type: ignore[method-assign]
    for owner, name, part in spots:
        setattr(owner, name, clock.around(part, getattr(owner, name)))


def _with_backward(clock: Clock, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The head's forward. Its backward is timed from its result to the gradient of its input."""

    def head(hidden: Tensor, *args: Any) -> Tensor:
        result = forward(hidden, *args)
        if result.requires_grad and hidden.requires_grad:
            result.register_hook(lambda _: _turn("loss"))
            hidden.register_hook(lambda _: _turn("backward"))
        return result

    def _turn(part: str) -> None:
        clock.switch(part)

    return head


class Step:
    """One optimizer step. `report` returns the time of each part since the last report."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.trainer, self.clock = job.trainer, clock

    def __call__(self) -> float:
        self.trainer.train_step(stop=False)
        self.trainer.after_step()
        return 0.0

    def report(self) -> dict[str, Any]:
        """Seconds by part, and bytes of each column of the model state on this rank."""
        self.clock.switch("other")
        seconds, self.clock.seconds = self.clock.seconds, dict.fromkeys(PARTS, 0.0)
        return {"parts": seconds, "state_bytes": self.trainer.state.model.bytes()}


def build(work: Workload, layout: tuple[str, ...] = (), replicas: int = 1) -> Step:
    job, clock = build_megazero(work, list(layout), replicas), Clock()
    attach(clock, job)
    return Step(job, clock)
