"""What the engine asks of others: the model state for instructions on buckets, a memory for activations that leave the
device, and the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from megazero.program.instruction import ComputationKey, Instruction, Kind


class Gradients(Protocol):
    """Where gradients go that a backward makes."""

    def before_backward(self, defer: ComputationKey | None) -> None:
        """Called before a backward. defer: it is the input part of a split one; gradients of weights can wait for
        `run_deferred` with the same key.
        """

    def after_backward(self) -> None:
        """Called after a backward: each of its gradients has been accumulated or deferred."""

    def run_deferred(self, key: ComputationKey) -> None:
        """Accumulate the gradients that the backward with this key deferred."""


class StateActions(Protocol):
    """The parameters and gradients of a rank. Buckets are named by their numbers in `program.shape.RankShape`."""

    @property
    def by_kind(self) -> Mapping[Kind, Callable[[Instruction], None]]:
        """What executes an instruction on buckets, by its kind: `zero.actions` has the table.

        Gathers and reductions are started. Of `STATE_MOVES` each is started on its own lane, to read, copy, add, count
        or write a part of a bucket (-1: all of it), and the program waits for nothing.
        """

    @property
    def gradients(self) -> Gradients:
        """Where this rank's gradients go."""

    def settle(self) -> None:
        """Make the updates that the last step has left to the next one, if it has left any. Called before anything but
        that step.
        """

    def ready(self, buckets: Sequence[int]) -> None:
        """Return once the parameters of these buckets can be read: wait for gathers that were launched."""


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

    def expect(self, pieces: int) -> None:
        """Called before a pass, with the most graphs that are in files at a time in it; 0: none goes there."""

    def graph(self, name: str) -> KeptGraph:
        """A graph whose activations will leave. name: in words, for errors."""


class NoState:
    """Parameters that nobody shards, gathers or trains: those of a model for inference."""

    by_kind: Mapping[Kind, Callable[[Instruction], None]] = MappingProxyType({})

    @property
    def gradients(self) -> Gradients:
        raise AssertionError("there is no training without a model state")

    def settle(self) -> None:
        """Nothing is ever updated."""

    def ready(self, buckets: Sequence[int]) -> None:
        """They are always there."""
