"""Units of a model as one tp rank has them, before there are ranks: for measurements of bytes and of times.

The modules are cut as an engine cuts them, by a group whose other ranks are not there (`mpu.absent`), and are as before
behind it. All tp ranks have as much of everything, so the first one is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.config.schema import Run
from megazero.mpu.absent import alike_group
from megazero.mpu.parameter import ParameterSpec
from megazero.own.rank_units import inventory_of, plan_of
from megazero.own.settings import dtype_of_all
from megazero.own.tensor_parallel.boxes import part_of
from megazero.own.tensor_parallel.modules import TensorParallelModules
from megazero.own.units.model import Model, OwnUnit
from megazero.own.units.stage import by_places
from megazero.own.units.taken_tensors import taken_dtype
from megazero.own.units.values import InitialValues


@dataclass(frozen=True)
class UnitParts:
    """The units of a model while they are cut.

    dtype   of all parameters; None: each keeps its own
    cut     by the name of each parameter of which the rank has a part, which one
    """

    model: Model
    dtype: torch.dtype | None
    cut: dict[str, ParameterSpec]

    def tensors(self, unit: OwnUnit, device: torch.device) -> dict[str, Tensor]:
        """Parameters and buffers of a unit by the places where it has them, with their values, of which the rank may
        have a part, in memory of their own.
        """
        values = InitialValues()
        values.add(unit, self.model)

        def made(name: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                value = self._part(self.model.names[id(tensor)], values)
            else:
                value = values.of_buffer(unit, name.removeprefix("module.")) if tensor.is_meta else tensor
            wanted = taken_dtype(tensor, self.dtype)
            return value.detach().to(device, wanted, copy=True).requires_grad_(tensor.requires_grad)

        return by_places(unit, made)

    def _part(self, name: str, values: InitialValues) -> Tensor:
        whole = values.of(name)
        return part_of(whole, self.cut[name]) if name in self.cut else whole


@contextmanager
def cut_units(model: Model, run: Run) -> Iterator[UnitParts]:
    """A context in which the units of a model are cut as those of the first of a run's tp ranks. Communicates nothing.

    Raises ConfigError for a plan that is wrong.
    """
    tp, dtype = run.parallel.tp, dtype_of_all(run)
    if tp == 1:
        yield UnitParts(model, dtype, {})
        return
    plan = plan_of(model, run)
    every = inventory_of(model, set(), {}, plan, has_several_dtypes=dtype is None)
    cut = {each.name: each.spec(0, tp) for unit in every for each in unit if each.split is not None}
    modules = TensorParallelModules(alike_group(tp), plan, model.called_units)
    try:
        yield UnitParts(model, dtype, cut)
    finally:
        modules.undo()
