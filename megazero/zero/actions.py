"""What a step's list asks of the model state, by number of the bucket; `pipeline.actions.StateActions` names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megazero.config.tiers import Tier
from megazero.program.instruction import (
    LOAD,
    READ_PARAMETERS,
    READ_STATE,
    ComputationKey,
    Instruction,
    Kind,
    Op,
    Piece,
    TierMove,
)
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.host_gradients import HostGradients
from megazero.zero.host_parts import HostParts
from megazero.zero.owed import OwedUpdates
from megazero.zero.reducer import Arrived, GradientReducer


class BucketActions:
    """The actions of one rank: reductions by its reducer, gathers by its gatherer, moves to host memory and back by its
    host parts. Updates are those of `zero.step_end`.

    owed: updates that a step leaves. gradients: sums of gradients that are not on the device.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        owed: OwedUpdates,
        host: HostParts,
        gradients: HostGradients,
    ) -> None:
        self.reducer, self.gatherer, self.owed, self.host, self.gradients = reducer, gatherer, owed, host, gradients

    def settle(self) -> None:
        """Make the updates that the last step has left."""
        self.owed.settle()

    def ready(self, buckets: Sequence[int]) -> None:
        """Return once the parameters of these buckets are there."""
        self.host.ready(buckets)
        self.gatherer.ready(buckets)

    def move(self, i: Instruction) -> None:
        """Start what an instruction of `STATE_MOVES` says."""
        _MOVES[i.op](self, i)

    def gather(self, bucket: int) -> None:
        """Start to gather a bucket's parameters, once this rank's shard is updated.

        A bucket that is loaded from host memory or disks needs no wait: its load has waited for the update.
        """
        if not self.gatherer.resting.shape.buckets[bucket].is_loaded:
            self.host.ready([bucket])
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


_MOVES: Mapping[Kind, Callable[[BucketActions, Instruction], object]] = MappingProxyType(
    {
        READ_PARAMETERS: lambda of, i: of.gatherer.resting.read(i.key, i.slot),
        # Once they are updated: what a load waits for is waited for on its lane.
        LOAD: lambda of, i: of.gatherer.load(*i.key, of.host.arriving(i.buckets[0])),
        TierMove(Piece.UPDATED, Tier.HOST, Tier.DEVICE): lambda of, i: of.host.copy_parameters(i),
        TierMove(Piece.UPDATED, Tier.DEVICE, Tier.HOST): lambda of, i: of.host.store(i),
        TierMove(Piece.UPDATED, Tier.HOST, Tier.DISK): lambda of, i: of.host.write_parameters(i),
        READ_STATE: lambda of, i: of.host.read(i),
        TierMove(Piece.STATE, Tier.HOST, Tier.DISK): lambda of, i: of.host.write(i),
        TierMove(Piece.GRADIENTS, Tier.DEVICE, Tier.HOST): lambda of, i: of.host.copy_gradient(i),
        TierMove(Piece.GRADIENTS, Tier.DISK, Tier.HOST): lambda of, i: of.gradients.read(i),
        TierMove(Piece.GRADIENTS, Tier.HOST, Tier.DEVICE): lambda of, i: of.gradients.fetch(i),
        TierMove(Piece.SUMS, Tier.DEVICE, Tier.HOST): lambda of, i: of.gradients.store(i),
        TierMove(Piece.SUMS, Tier.DISK, Tier.HOST): lambda of, i: of.gradients.read(i),
        TierMove(Piece.SUMS, Tier.HOST, Tier.DISK): lambda of, i: of.gradients.write_sum(i),
        TierMove(Piece.REDUCED, Tier.DEVICE, Tier.HOST): lambda of, i: of.gradients.copy_gradient(i),
        Op.ADD_GRADIENT: lambda of, i: of.gradients.add(i),
        Op.COUNT_GRADIENT: lambda of, i: of.gradients.count(i),
    }
)
"""What the instructions of `STATE_MOVES` do."""
