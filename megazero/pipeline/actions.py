"""What the engine asks of others: the model state for instructions on buckets, a memory for activations that leave the
device, and the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megazero.program.instruction import ComputationKey, Instruction, Kind


class StateActions(Protocol):
    """The parameters and gradients of a rank: one method for each kind of instruction, and what surrounds a backward.

    Buckets are named by their numbers in `program.shape.RankShape`.
    """

    def settle(self) -> None:
        """Make the updates that the last step has left to the next one, if it has left any. Called before anything but
        that step.
        """

    def ready(self, buckets: Sequence[int]) -> None:
        """Return once the parameters of these buckets can be read: wait for gathers that were launched."""

    def gather(self, bucket: int) -> None:
        """Start to gather the whole parameters of a bucket from the ranks' shards."""

    def release(self, bucket: int) -> None:
        """Free the whole parameters of a bucket; this rank's shard stays."""

    def before_backward(self, defer: ComputationKey | None) -> None:
        """Called before a backward. defer: it is the input part of a split one; gradients of weights can wait for
        `run_deferred` with the same key.
        """

    def after_backward(self) -> None:
        """Called after a backward: each of its gradients has been accumulated or deferred."""

    def run_deferred(self, key: ComputationKey) -> None:
        """Accumulate the gradients that the backward with this key deferred."""

    def reduce(self, bucket: int) -> None:
        """Start to sum a bucket's gradients over the ranks that share its shards."""

    def reduce_across(self, bucket: int) -> None:
        """Start to sum a bucket's reduced shard over the ranks that hold the same one."""

    def reduce_partial(self, buckets: Sequence[int]) -> None:
        """Sum partial gradients over tp: of reduced buckets whose sums leave the device, or (none named) of all others,
        once all reductions are complete.
        """

    def move(self, i: Instruction) -> None:
        """Start to read, copy, add, count or write what the instruction says of a part of a bucket (-1: all of it), on
        the instruction's lane. The program waits for nothing.
        """


class StepEnd(Protocol):
    """The end of a step."""

    def norm(self, loss_sum: Tensor) -> None:
        """Reduce what all ranks have to know: the norm, the loss and requests. loss_sum: 0-dim float64 of this rank."""

    def update(self, i: Instruction) -> None:
        """Update the ranges of an instruction's buckets that this rank owns, or a part of one. In host memory the
        update is started.
        """


class KeptGraph(Protocol):
    """What one graph of autograd keeps for its backward, where it leaves the device between the two."""

    def recording(self) -> AbstractContextManager[None]:
        """The context of its forward."""

    def move(self, kind: Kind) -> None:
        """One of `ACTIVATION_MOVES`: start to copy it, or free it where a copy elsewhere is made."""

    def ready(self) -> None:
        """Called before its backward, which finds it on the device."""


class ActivationActions(Protocol):
    """A memory for what leaves the device."""

    def graph(self, name: str) -> KeptGraph:
        """A graph whose activations will leave. name: in words, for errors."""


class NoState:
    """Parameters that nobody shards, gathers or trains: those of a model for inference."""

    def settle(self) -> None:
        """Nothing is ever updated."""

    def ready(self, buckets: Sequence[int]) -> None:
        """They are always there."""

    def gather(self, bucket: int) -> None:
        raise AssertionError("parameters without a model state are whole")

    release = reduce = reduce_across = gather

    def before_backward(self, defer: ComputationKey | None) -> None:
        raise AssertionError("there is no training without a model state")

    def after_backward(self) -> None:
        raise AssertionError("there is no training without a model state")

    def reduce_partial(self, buckets: Sequence[int]) -> None:
        raise AssertionError("there is no training without a model state")

    def move(self, i: Instruction) -> None:
        raise AssertionError("parameters without a model state have no parts")

    def run_deferred(self, key: ComputationKey) -> None:
        raise AssertionError("there is no training without a model state")
