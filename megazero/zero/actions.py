"""What a step's list asks of the model state, by number of the bucket; `pipeline.actions.StateActions` names it."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.program.instruction import ComputationKey, Instruction
from megazero.program.shape import RankShape
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.mover import Mover
from megazero.zero.owed import OwedUpdates
from megazero.zero.reducer import Arrived, GradientReducer


class BucketActions:
    """The actions of one rank: reductions by its reducer, gathers by its gatherer, moves between tiers by its mover.
    Updates are those of `zero.step_end`.

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
