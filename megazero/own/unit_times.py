"""How long each unit of a model takes for a micro-batch, by which units are divided among stages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from megazero.config.schema import Run
from megazero.mpu.bundle import Bundle, tensors_of, with_tensors
from megazero.own.unit_parts import cut_units
from megazero.own.units.model import BatchTensors, Model, OwnUnit
from megazero.own.units.refusals import micro_batches
from megazero.own.units.stage import as_bundle, loss_of, named
from megazero.system import device as devices
from megazero.system.generators import torch_generators_kept

REPEATS = 4
"""Of which the least counts: what else the machine does makes a unit slower alone."""


def unit_seconds(model: Model, batch: BatchTensors, run: Run, device: torch.device) -> list[float]:
    """Seconds that the forward and the backward of each unit take on a device, in forward order: on one of tp ranks,
    without messages. A forward that a backward makes again counts twice.

    batch: a micro-batch of a step. The model is as before behind it. Memory: one unit, and what it keeps for backward.

    Communicates nothing. Raises ValueError with a unit's name for what the unit returns.
    """
    taken = micro_batches(batch, device)[0].tensors
    hidden: Bundle | None = None
    seconds = list[float]()
    recomputes = run.parallel.recompute_granularity == "full"
    with torch_generators_kept(device), torch.enable_grad(), cut_units(model, run) as parts:
        for unit in model.called_units:
            is_last = unit is model.called_units[-1]
            tensors = parts.tensors(unit, device)
            with unit.without_trace():
                passes = [_passed(unit, tensors, hidden, taken, device, is_last=is_last) for _ in range(REPEATS)]
            forward, backward = min(each.forward for each in passes), min(each.backward for each in passes)
            seconds.append(forward * (2 if recomputes and not is_last else 1) + backward)
            hidden = passes[-1].made
    return seconds


class _Pass(NamedTuple):
    """Seconds of a forward and of its backward, and what the unit returns, as leaves of a graph."""

    forward: float
    backward: float
    made: Bundle


def _passed(
    unit: OwnUnit,
    tensors: Mapping[str, Tensor],
    hidden: Bundle | None,
    batch: BatchTensors,
    device: torch.device,
    *,
    is_last: bool,
) -> _Pass:
    """A forward and a backward of a unit. hidden: as leaves."""
    inputs = () if hidden is None else tensors_of(hidden)
    given = None if hidden is None else with_tensors(hidden, [each.clone() for each in inputs])  # a unit may change it
    with named(unit):
        began = _now(device)
        returned: Any = functional_call(unit, dict(tensors), (given, batch), tie_weights=False)
        forward = _now(device) - began
        made = loss_of(unit, returned)[0] if is_last else as_bundle(unit, returned)
        graded = [each for each in tensors_of(made) if each.requires_grad]
        leaves = {id(each): each for each in (*inputs, *tensors.values()) if each.requires_grad}
        ones = [torch.ones_like(each) for each in graded]
        began = _now(device)
        if graded:
            torch.autograd.grad(graded, [*leaves.values()], ones, allow_unused=True)
        backward = _now(device) - began
    outputs = [each.detach().requires_grad_(each.requires_grad) for each in tensors_of(made)]
    return _Pass(forward, backward, with_tensors(made, outputs))


def _now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    devices.synchronize(device)
    return time.perf_counter()
