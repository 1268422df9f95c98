"""What a step's list asks of the model state, as a table from kinds of instructions (`pipeline.actions.StateActions`),
and the updates that a step leaves to the next one (--late-update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megazero.program.instruction import RELEASE, STATE_MOVES, Instruction, Kind, Op
from megazero.program.shape import RankShape
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.mover import Mover
from megazero.zero.reducer import GradientReducer


@dataclass(frozen=True)
class UpdateValues:
    """What all updates of a step share. It belongs to the step whose gradients they are, whenever they are made.

    lr          learning rate of this step
    multiplier  0-dim on the device: clip coefficient / loss scale
    skip        0-dim bool on the device, the same on all ranks: weights, moments and step count keep their bits
    number      0-dim float64 on the device: number of this step, from 1, among those that are not skipped
    groups      options of each group of parameters in this step, `lr` among them, by the names of what updates them:
                fields of `OptimizerConfig`, or those of an optimizer of torch. Empty: all parameters have `lr` and the
                options that the optimizer was made with
    again       whether the updates have been made before, with other values: parameters are to be rounded anew from the
                weights that a skipped step keeps
    """

    lr: float
    multiplier: Tensor
    skip: Tensor
    number: Tensor
    groups: tuple[Mapping[str, Any], ...] = ()
    again: bool = False

    def of_groups(self) -> Iterator[tuple[int, UpdateValues]]:
        """(number of a group, the same values with the options of this group alone)."""
        if not self.groups:
            yield 0, self
        for number, options in enumerate(self.groups):
            yield number, replace(self, lr=options["lr"], groups=(options,))

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the one group that these values are for; empty: those that the optimizer was made with."""
        return self.groups[0] if self.groups else {}

    def on_host(self) -> UpdateValues:
        """The same in host memory. Waits for the device."""
        return replace(self, multiplier=self.multiplier.cpu(), skip=self.skip.cpu(), number=self.number.cpu())


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
    """What the engine asks of one rank's model state: reductions of its reducer, gathers of its gatherer, moves between
    tiers of its mover. Updates are those of `zero.optimizer`.

    by_kind    what executes an instruction, by its kind
    gradients  the reducer, which a backward gives its gradients
    owed       updates that a step leaves
    """

    def __init__(
        self,
        shape: RankShape,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        mover: Mover,
        owed: OwedUpdates,
    ) -> None:
        self.gradients, self.gatherer, self.mover, self.owed = reducer, gatherer, mover, owed

        def gather(i: Instruction) -> None:
            (bucket,) = i.buckets
            # A bucket that is loaded from host memory or disks needs no wait: its load has waited for the update.
            if not shape.buckets[bucket].is_loaded:
                mover.ready([bucket])
            gatherer.gather(bucket)

        self.by_kind: Mapping[Kind, Callable[[Instruction], None]] = {
            Op.GATHER: gather,
            RELEASE: lambda i: gatherer.release(*i.buckets),
            Op.REDUCE: lambda i: reducer.reduce(*i.buckets),
            Op.REDUCE_ACROSS: lambda i: reducer.reduce_across(*i.buckets),
            Op.REDUCE_PARTIAL: lambda i: reducer.sum_partials(i.buckets),
            **dict.fromkeys(STATE_MOVES, mover.move),
        }

    def settle(self) -> None:
        """Make the updates that the last step has left."""
        self.owed.settle()

    def ready(self, buckets: Sequence[int]) -> None:
        """Return once the parameters of these buckets are there."""
        self.mover.ready(buckets)
        self.gatherer.ready(buckets)
