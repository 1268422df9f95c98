"""A fragment: what ZeRO leaves one rank of one parameter, with its values and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.mpu.parameter import ParameterSpec


@dataclass(frozen=True)
class FragmentSpec:
    """Elements [start, stop), in row-major order, of the box that `spec` names: a fragment without its values.

    Layout arithmetic knows the fragments of every rank by these.
    """

    spec: ParameterSpec
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment(FragmentSpec):
    """A fragment with one contiguous 1-D tensor of `numel` elements per column; a column that is missing is None.

    The tensors of a model state are views of its memory: a save reads them and a load writes into them. In a file that
    is being written, a column may also be a `checkpoint.blocks.DeferredTensor`.

    weight      the master weight
    exp_avg     the first moment; with sgd its momentum
    exp_avg_sq  the second moment
    """

    weight: Any = None
    exp_avg: Any = None
    exp_avg_sq: Any = None
