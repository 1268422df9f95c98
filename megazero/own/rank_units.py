"""Which units of a model a rank has: their stages, what is known of all parameters, and the first values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Parameter
from megazero.own.model import Model, OwnUnit
from megazero.own.saved import ParameterShape
from megazero.own.settings import chunk_units
from megazero.own.stage import OwnStage, forget_values, take_buffers, take_parameters
from megazero.own.values import InitialValues
from megazero.pipeline.stage_specs import chunks_of


@dataclass(frozen=True)
class PlacedModel:
    """A model on this rank.

    units      all of the model. Those of other ranks have no values
    chunks     the numbers of the units of each model chunk
    inventory  the parameters of each unit
    stages     this rank's chunks
    values     with which this rank's units begin
    """

    units: tuple[OwnUnit, ...]
    chunks: tuple[range, ...]
    inventory: list[list[ParameterShape]]
    stages: list[OwnStage]
    values: InitialValues


def place_model(model: Model, run: Run, grid: ProcessGrid) -> PlacedModel:
    """Make the parameters of this rank's units those of a model state, without values, and free those of others.

    Communicates nothing. Raises ConfigError for a model that an engine has already, and for parameters on other stages
    than one, or the first and the last.
    """
    if model.is_taken:
        raise ConfigError(["the model is an engine's already, and its parameters are the engine's: make another one"])
    model.is_taken = True
    costs = [sum(parameter.numel() for parameter in unit.parameters()) for unit in model.units]
    chunks = chunk_units(run, costs)
    inventory = _inventory(model, run, chunks)
    own = [chunks[number] for number in chunks_of(run).of(grid.at.pp)]
    here = sorted({number for units in own for number in units})
    values, made, dtype = InitialValues(), dict[str, Parameter](), compute_dtype(run.optimizer.precision)
    for number in here:
        values.add(model.units[number], model)
    specs = {each.name: each.spec for number in here for each in inventory[number]}
    for number in here:
        values.fill_buffers(model.units[number])
        take_buffers(model.units[number], dtype, grid.device)
        take_parameters(model.units[number], model.names, specs, dtype, grid.device, made)
    used = {id(module) for number in here for module in model.units[number].modules()}
    for number, unit in enumerate(model.units):
        # a module that is used twice may be here and elsewhere
        if number not in here and used.isdisjoint(map(id, unit.modules())):
            forget_values(unit)
    stages = [_stage([model.units[number] for number in units], units, model, run, grid) for units in own]
    return PlacedModel(model.units, chunks, inventory, stages, values)


def _stage(units: Sequence[OwnUnit], numbers: range, model: Model, run: Run, grid: ProcessGrid) -> OwnStage:
    again = run.parallel.recompute_granularity == "full"
    return OwnStage(
        units,
        has_loss=numbers.stop == len(model.units),
        computes_again=again,
        keeps_buffers=again or grid.replicas.size > 1,
        device=grid.device,
    )


def _inventory(model: Model, run: Run, chunks: Sequence[range]) -> list[list[ParameterShape]]:
    """The parameters of each unit."""
    stages, holders = dict[str, set[int]](), chunks_of(run)
    for model_chunk, units in enumerate(chunks):
        for number in units:
            for parameter in model.units[number].parameters():
                stages.setdefault(model.names[id(parameter)], set()).add(holders.holder(model_chunk)[0])
    last = run.parallel.pp - 1
    tied = {name for name, on in stages.items() if len(on) > 1}
    if wrong := [name for name in stages if name in tied and stages[name] != {0, last}]:
        on = ", ".join(map(str, sorted(stages[wrong[0]])))
        raise ConfigError(
            [
                f"parameter {wrong[0]} is of units on stages {on}: a parameter is on one stage, or on the first "
                f"and the last (0 and {last}); partition says which units are together"
            ]
        )

    for stage in {0, last} if tied else ():
        _require_one_chunk(model, [chunks[number] for number in holders.of(stage)], tied)

    def shape_of(parameter: nn.Parameter) -> ParameterShape:
        name = model.names[id(parameter)]
        return ParameterShape(name, tuple(parameter.shape), parameter.requires_grad, name in tied)

    return [[shape_of(parameter) for parameter in unit.parameters()] for unit in model.units]


def _require_one_chunk(model: Model, chunks: Sequence[range], tied: Set[str]) -> None:
    """Raise ConfigError if a stage has what spans stages in several of its chunks: as several buckets, of which the
    other stage may have others.
    """
    seen, firsts = set[str](), list[str]()
    for units in chunks:
        names = [model.names[id(each)] for number in units for each in model.units[number].parameters()]
        if fresh := [name for name in names if name in tied and name not in seen]:
            seen.update(fresh)
            firsts.append(fresh[0])
    if len(firsts) > 1:
        raise ConfigError(
            [
                f"parameters {' and '.join(sorted(firsts))} are on the first stage and the last in other model chunks "
                "of a stage: virtual_stages 1, or a partition that has both in one chunk, is needed"
            ]
        )


def structure_digest(model: Model) -> int:
    """What is equal where models have the same units, with the same names, shapes and dtypes."""
    digest = 0
    for unit in model.units:
        for name, tensor in unit.tensors():
            words = f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
            digest = zlib.crc32(words.encode(), digest)
        digest = zlib.crc32(f"{unit.name} {type(unit.module).__name__}".encode(), digest)
    return digest


def values_digest(model: Model) -> int:
    """What is equal where models begin with the same values. All of them are read; of what is on the meta device
    torch's seed counts, which makes them.
    """
    tensors = {name: tensor for unit in model.units for name, tensor in unit.tensors()}
    blank = any(tensor.is_meta for tensor in tensors.values())
    digest = zlib.crc32(str(torch.initial_seed() if blank else 0).encode())
    for tensor in tensors.values():
        if not tensor.is_meta:
            numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = zlib.crc32(numbers.data, digest)
    return digest
