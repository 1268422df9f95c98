"""What all ranks know of a parameter of a user's model, whichever of them has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup, shard
from megazero.own.tensor_parallel.words import ParameterSplit


@dataclass(frozen=True)
class ParameterShape:
    """A parameter of a model, as all ranks know it.

    is_tied     whether several stages have it
    keep_whole  whether it stays whole on every rank with ZeRO-3
    split       how it is cut among tp ranks; None: each has all of it
    is_partial  whether each tp rank's gradient of the whole is a part of a sum
    dtype       its own, where parameters of the run have several; None: that of all
    """

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    is_tied: bool = False
    keep_whole: bool = False
    split: ParameterSplit | None = None
    is_partial: bool = False
    dtype: torch.dtype | None = None

    def spec(self, rank: int, size: int) -> ParameterSpec:
        """That of tp rank `rank` of `size`."""
        group = StateGroup.TIED if self.is_tied else StateGroup.REPLICAS
        rest: dict[str, Any] = {
            "state_group": group,
            "keep_whole": self.keep_whole,
            "tp_partial": self.is_partial and size > 1,
            "dtype": self.dtype,
        }
        if self.split is None:
            return shard(self.name, self.shape, ParameterKind.MATRIX, **rest)
        return self.split.spec(self.name, self.shape, rank, size, **rest)
