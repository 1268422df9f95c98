"""Updates that a step leaves to the next one (--late-update), and the values that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
