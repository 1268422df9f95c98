"""What a step's list asks of the model state, by number of the bucket (`pipeline.actions.StateActions` names it), and
the updates that a step leaves to the next one (--late-update).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megazero.program.instruction import ComputationKey, Instruction
from megazero.program.shape import RankShape
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.mover import Mover
from megazero.zero.reducer import Arrived, GradientReducer


@dataclass(frozen=True)
class UpdateValues:
    """What all updates of a step share. It belongs to the step whose gradients they are, whenever they are made.

    lr          learning rate of this step
    multiplier  0-dim on the device: clip coefficient / loss scale
    skip        0-dim bool on the device, the same on all ranks: weights, moments and step count keep their bits
    number      0-dim float64 on the device: number of this step, from 1, among those that are not skipped
    """

    lr: float
    multiplier: Tensor
    skip: Tensor
    number: Tensor

    def on_host(self) -> UpdateValues:
        """The same in host memory. Waits for the device."""
        return UpdateValues(self.lr, self.multiplier.cpu(), self.skip.cpu(), self.number.cpu())


class OwedUpdates:
    """The updates that the last step has left. They are made once: by the next step's list, whose step calls `take`, or
    by a list of updates alone, as soon as something else needs the parameters.
    """

    def __init__(self) -> None:
        self._left: tuple[UpdateValues, Callable[[UpdateValues], None]] | None = None

    def leave(self, values: UpdateValues, make: Callable[[UpdateValues], None]) -> None:
        """Leave the updates of a step. make: makes all of them at once."""
        assert self._left is None, "the updates of the step before have not been made"
        self._left = values, make

    def take(self) -> UpdateValues | None:
        """The values of updates that the caller now makes; None if none are left."""
        left, self._left = self._left, None
        return None if left is None else left[0]

    def settle(self) -> None:
        """Make the updates now, if any are left. Then a collective of all ranks that share parameters."""
        if self._left is not None:
            (values, make), self._left = self._left, None
            make(values)


class BucketActions:
    """The actions of one rank: reductions by its reducer, gathers by its gatherer, moves between tiers by its mover.
    Updates are those of `zero.optimizer`.

    owed: updates that a step leaves
    """

    def __init__(
        self,
        shape: RankShape,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        mover: Mover,
        owed: OwedUpdates,
    ) -> None:
        self.shape, self.reducer, self.gatherer, self.mover, self.owed = shape, reducer, gatherer, mover, owed

    def settle(self) -> None:
        """Make the updates that the last step has left."""
        self.owed.settle()

    def ready(self, buckets: Sequence[int]) -> None:
        """Return once the parameters of these buckets are there."""
        self.mover.ready(buckets)
        self.gatherer.ready(buckets)

    def move(self, i: Instruction) -> None:
        """Start what an instruction of `STATE_MOVES` says."""
        self.mover.move(i)

    def gather(self, bucket: int) -> None:
        """Start to gather a bucket's parameters, once this rank's shard is updated.

        A bucket that is loaded from host memory or disks needs no wait: its load has waited for the update.
        """
        if not self.shape.buckets[bucket].is_loaded:
            self.mover.ready([bucket])
        self.gatherer.gather(bucket)

    def release(self, bucket: int) -> None:
        """Free a sharded bucket's whole parameters."""
        self.gatherer.release(bucket)

    def before_backward(self, defer: ComputationKey | None) -> None:
        """Called before a backward."""
        self.reducer.before_backward(defer)

    def after_backward(self) -> None:
        """Called after a backward."""
        self.reducer.after_backward()

    def run_deferred(self, key: ComputationKey) -> None:
        """Accumulate the gradients that a backward deferred."""
        self.reducer.run_deferred(key)

    def reduce(self, bucket: int) -> None:
        """Start to reduce a bucket's gradients."""
        self.reducer.reduce(bucket)

    def reduce_across(self, bucket: int) -> None:
        """Start to sum a reduced shard over the ranks that hold the same one."""
        self.reducer.reduce_across(bucket)

    def reduce_partial(self, buckets: Sequence[int]) -> None:
        """Sum partial gradients of buckets, or of all (none named), over tp."""
        self.reducer.sum_partials(buckets)

    def arrived(self) -> Arrived:
        """See `GradientReducer.arrived`."""
        return self.reducer.arrived()

    def say_arrived(self, arrived: Arrived) -> None:
        """See `GradientReducer.say_arrived`."""
        self.reducer.say_arrived(arrived)
