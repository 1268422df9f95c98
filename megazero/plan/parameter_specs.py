"""The parameter specs of any rank, by arithmetic."""

from __future__ import annotations

from functools import lru_cache

import torch

from megazero.config.placement import unplaced
from megazero.config.schema import Run
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterSpec
from megazero.pipeline.build import stages_of
from megazero.zero.frozen import specs_by_unit


def specs_of(run: Run, pp_index: int, tp_index: int, *, trained: bool = True) -> list[list[list[ParameterSpec]]]:
    """The specs of the parameters that a rank with these coordinates trains, by chunk and unit.

    The stages are built on the meta device, which takes no memory. trained=False: the specs of the parameters that the
    rank holds and does not train (with --lora-rank, all but the adapters).
    """
    return [[[*unit] for unit in chunk] for chunk in _found(unplaced(run), pp_index, tp_index, trained)]


@lru_cache(maxsize=64)
def _found(run: Run, pp_index: int, tp_index: int, trained: bool) -> list[list[list[ParameterSpec]]]:
    """`specs_of` a run without a placement. A search asks for them hundreds of times, and building takes longest."""
    tp = Group(tuple(range(run.parallel.tp)), tp_index, None)
    stages = stages_of(run, pp_index, tp, torch.device("meta"))
    return specs_by_unit([stage.units() for stage in stages], trained=trained)
