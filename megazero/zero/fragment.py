"""Fragments: the part of one parameter whose state ZeRO gives to one rank, with its values and without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megazero.mpu.parameter import ParameterSpec


@dataclass(frozen=True)
class FragmentSpec:
    """A fragment without its values: elements [start, stop), in row-major order, of the box of `spec`.

    Layout arithmetic computes these for any rank.
    """

    spec: ParameterSpec
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StoredFragment(FragmentSpec):
    """A fragment of which some place has the values. dtypes: of the columns that exist, by their name in `Fragment`."""

    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Fragment(FragmentSpec):
    """A fragment with one contiguous 1-D tensor of `numel` elements per column; None for a column that does not exist.

    A model state gives its fragments in portions, whose tensors may exist only while they are looked at.

    weight      the master weight, or the parameter where it is its own master
    exp_avg     Adam's first moment; the momentum of sgd
    exp_avg_sq  Adam's second moment
    """

    weight: Any = None
    exp_avg: Any = None
    exp_avg_sq: Any = None
