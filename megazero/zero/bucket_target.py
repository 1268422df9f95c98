"""Where a layer's backward writes the gradient of a parameter: its place in a bucket."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol

from torch import Tensor

from fused_ops.linear import write_or_add
from megazero.mpu.gradient import Write


class TakesGradients(Protocol):
    """A reducer."""

    def take(self, index: int, entry: int, write: Write) -> None:
        """Add the gradient that `write` makes of an entry of a bucket."""


class BucketTarget:
    """The gradient target of one parameter.

    It has a weak reference to the reducer. The garbage collector cannot see torch's hooks: with a strong reference the
    cycle of parameter, hook, reducer, bucket and parameter, and the process groups in it, would never be freed.
    """

    def __init__(self, reducer: TakesGradients, index: int, entry: int) -> None:
        self._reducer, self._at = weakref.ref(reducer), (index, entry)

    def add(self, write: Write) -> None:
        """See `mpu.gradient.GradientTarget`."""
        reducer = self._reducer()
        assert reducer is not None, "the model state of this parameter is gone"
        reducer.take(*self._at, write)

    def take_from(self, parameter: Tensor) -> None:
        """Add `parameter.grad`, which autograd has completed. It is None where a layer has used the target itself."""
        gradient = parameter.grad
        if gradient is not None:
            self.add(partial(write_or_add, gradient))
            parameter.grad = None
