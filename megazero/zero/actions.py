"""What a step's list asks of the model state, by number of the bucket; `pipeline.actions.StateActions` names it."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tiers import Tier
from megazero.program.instruction import ComputationKey
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.host_gradients import HostGradients
from megazero.zero.host_parts import HostParts
from megazero.zero.owed import OwedUpdates
from megazero.zero.reducer import Arrived, GradientReducer


class BucketActions:
    """The actions of one rank: reductions by its reducer, gathers by its gatherer, moves to host memory and back by its
    host parts. owed: updates that a step leaves. gradients: sums of them that are not on the device.
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

    def read_parameters(self, bucket: int, part: int) -> None:
        """Start to read a part of a bucket's parameters from disks."""
        self.gatherer.resting.read((bucket, part))

    def load(self, bucket: int, part: int) -> None:
        """Start to copy a bucket's parameters (-1), or a part of them, to the device, once they are updated."""
        self.gatherer.load(bucket, part, self.host.arriving(bucket))

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

    def copy_gradient(self, bucket: int, part: int) -> None:
        """Start to copy the reduced gradient of a part to host memory."""
        (self.gradients.copy if self.host.sums[bucket] is not Tier.DEVICE else self.host.copy_gradient)((bucket, part))

    def store_gradient(self, bucket: int, part: int) -> None:
        """Start to copy a step's first gradient of a part to host memory, as its sum."""
        self.gradients.store((bucket, part))

    def add_gradient(self, bucket: int, part: int) -> None:
        """Start to add a gradient that was copied to the sum."""
        self.gradients.add((bucket, part))

    def count_gradient(self, bucket: int, part: int) -> None:
        """Start to count the squares of a sum."""
        self.gradients.count(bucket, part)

    def read_sum(self, bucket: int, part: int) -> None:
        """Start to read the sum of a part from disks."""
        self.gradients.read_sum((bucket, part))

    def write_sum(self, bucket: int, part: int) -> None:
        """Start to write the sum of a part to disks."""
        self.gradients.write_sum((bucket, part))

    def read_gradient(self, bucket: int, part: int) -> None:
        """Start to read the gradient of a part for its update."""
        self.gradients.read((bucket, part))

    def fetch_gradient(self, bucket: int, part: int) -> None:
        """Start to copy the gradient of a part to the device."""
        self.gradients.fetch((bucket, part))

    def read_state(self, bucket: int, part: int) -> None:
        """Start to read the optimizer state of a part."""
        self.host.read((bucket, part))

    def copy_parameters(self, bucket: int, part: int) -> None:
        """Start to copy the updated parameters of a part to the device."""
        self.host.copy_parameters((bucket, part))

    def store(self, bucket: int, part: int) -> None:
        """Start to copy updated weights from the device to where the parameters rest, or on their way there."""
        self.host.store((bucket, part))

    def write_parameters(self, bucket: int, part: int) -> None:
        """Start to write the updated parameters of a part to disks."""
        self.host.write_parameters((bucket, part))

    def write_state(self, bucket: int, part: int) -> None:
        """Start to write the optimizer state of a part."""
        self.host.write((bucket, part))

    def arrived(self) -> Arrived:
        """See `GradientReducer.arrived`."""
        return self.reducer.arrived()

    def say_arrived(self, arrived: Arrived) -> None:
        """See `GradientReducer.say_arrived`."""
        self.reducer.say_arrived(arrived)
