"""Which units of a model a rank has: their stages, what is known of all parameters, and the first values."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from megazero.config.derive import brings_parameters, whole_steps
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import Parameter
from megazero.own.settings import chunk_units, dtype_of_all
from megazero.own.tensor_parallel.modules import TensorParallelModules, undividable
from megazero.own.tensor_parallel.plan import PLAN, ResolvedPlan, resolve
from megazero.own.units.model import Unit, Units
from megazero.own.units.parameter_shape import ParameterShape
from megazero.own.units.refusals import tensor_digest
from megazero.own.units.stage import OwnStage
from megazero.own.units.taken_tensors import BroughtParameter, forget_values, take_buffers, take_parameters
from megazero.own.units.unit_proof import UnitProof
from megazero.own.units.values import InitialValues
from megazero.pipeline.build import vertical_order
from megazero.pipeline.stage_specs import chunks_of

OF_FAMILY = (
    ". The plan is that of transformers for all models of the family, and does not fit this one: tp_plan= of "
    "from_transformers takes another"
)
"""What an error of a plan says of where the plan comes from."""


@dataclass(frozen=True)
class PlacedModel:
    """A model on this rank.

    units      all of the model. Those of other ranks have no values
    chunks     the numbers of the units of each model chunk
    inventory  the parameters of each unit
    stages     this rank's chunks
    values     with which this rank's units begin
    cuts       this rank's modules that a tensor-parallel plan cuts
    names      by each further name that modules have for a parameter, the parameter's own
    """

    units: tuple[Unit, ...]
    chunks: tuple[range, ...]
    inventory: list[list[ParameterShape]]
    stages: list[OwnStage]
    values: InitialValues
    cuts: TensorParallelModules
    names: dict[str, str]


def require_free(model: Units) -> None:
    """Raise ConfigError for a model that an engine has already."""
    if model.is_taken:
        raise ConfigError(["the model is an engine's already, and its parameters are the engine's: make another one"])


def place_model(model: Units, run: Run, grid: ProcessGrid) -> PlacedModel:
    """Make the parameters of this rank's units those of a model state, without values, and free those of others.

    Communicates nothing. Raises ConfigError for parameters of kinds that no model state takes.
    """
    if problems := [*_untrainable(model), *_overlapping(model)]:
        raise ConfigError(problems)
    chunks = chunks_of_units(model, run)
    plan = plan_of(model, run)
    model.is_taken, names = True, further_names(model)
    tied = tied_names(model, run, chunks)
    hold_together(model, held_parameters(model, run, chunks, tied))
    dtype = dtype_of_all(run)
    inventory = inventory_of(model, tied, {}, plan, has_several_dtypes=dtype is None)
    own = [chunks[number] for number in chunks_of(run).of(grid.at.pp)]
    here = sorted({number for units in own for number in units})
    values, made = InitialValues(), dict[str, Parameter]()
    for number in here:
        values.add(model.units[number], model)
    kind = BroughtParameter if brings_parameters(run.parallel, run.offload) else Parameter
    cuts = TensorParallelModules(grid.tp, plan, [model.units[number] for number in here])
    specs = {each.name: each.spec(grid.tp.index, grid.tp.size) for number in here for each in inventory[number]}
    for number in here:
        values.fill_buffers(model.units[number])
        take_buffers(model.units[number], dtype, grid.device)
        take_parameters(model.units[number], model.names, specs, dtype, grid.device, made, kind)
    used = {id(module) for number in here for module in model.units[number].modules()}
    for number, unit in enumerate(model.units):
        # a module that is used twice may be here and elsewhere
        if number not in here and used.isdisjoint(map(id, unit.modules())):
            forget_values(unit, model.names)
    shared = len(chunks) > 1 or vertical_order(run) is not None
    keeps = shared and _share_buffers(model)
    shapes = {each.name: each for number in here for each in inventory[number]}
    proof = UnitProof(cuts, shapes, OF_FAMILY if model.has_plan_of_family else "")
    proves = proof if model.is_proven and cuts.is_cut else None
    stages = [
        _stage([model.units[number] for number in units], units, model, run, grid, keeps=keeps, proof=proves)
        for units in own
    ]
    return PlacedModel(model.units, chunks, inventory, stages, values, cuts, names)


def further_names(model: Units) -> dict[str, str]:
    """By each name that units have for a parameter beside its own, its own."""
    every = ((name, each) for unit in model.units for name, each in unit.tensors() if isinstance(each, nn.Parameter))
    return {name: own for name, each in every if (own := model.names[id(each)]) != name}


def plan_of(model: Units, run: Run) -> ResolvedPlan:
    """What the plans of a model and of its modules say together of tensor parallelism.

    Raises ConfigError with everything that is wrong with the plans. Without tp ranks nothing is cut, a plan that
    transformers has for a family is not looked at, and numbers that no ranks could share are not, either.
    """
    modules, tp = [(unit.prefix, unit.module) for unit in model.units], run.parallel.tp
    plan = resolve(modules, model.tp_plan, model.names)
    if tp > 1:
        shapes = {model.names[id(each)]: tuple(each.shape) for unit in model.units for each in unit.parameters()}
        problems = [*plan.problems, *undividable(plan, shapes, tp)]
        if plan.is_empty and not problems:
            problems.append(
                f"tp is {tp}, and no plan says what of the model's modules is cut among {tp} ranks: tp_plan of the "
                "model, or of its modules, does"
            )
        if problems:
            raise ConfigError(problems)
        return plan
    if plan.problems and not model.has_plan_of_family:
        raise ConfigError(plan.problems)
    return replace(plan, splits={})


def _share_buffers(model: Units) -> bool:
    """Whether two units have a buffer together."""
    every = [id(buffer) for unit in model.units for buffer in {*unit.buffers()}]
    return len(every) > len({*every})


def _stage(
    units: Sequence[Unit],
    numbers: range,
    model: Units,
    run: Run,
    grid: ProcessGrid,
    *,
    keeps: bool,
    proof: UnitProof | None,
) -> OwnStage:
    """keeps: whether units have buffers together that they would not change in the order of the model."""
    again = run.parallel.recompute_granularity == "full"
    return OwnStage(
        units,
        has_loss=numbers.stop == len(model.units),
        computes_again=again,
        keeps_buffers=keeps or again or grid.replicas.size > 1 or whole_steps(run.offload),
        device=grid.device,
        proof=proof,
    )


def _untrainable(model: Units) -> Iterator[str]:
    """What no model state takes."""
    for unit in model.units:
        for name, parameter in unit.module.named_parameters():
            if not parameter.is_floating_point():
                yield f"parameter {unit.prefix}{name} is of {parameter.dtype}: numbers that are no floats are a buffer"
            elif type(parameter) not in (nn.Parameter, Parameter):
                kind = type(parameter).__name__
                yield f"parameter {unit.prefix}{name} is a {kind}: a plain nn.Parameter with a shape is needed"
        for name, module in unit.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                yield f"module {unit.prefix}{name} has sparse=True: gradients are added in one piece, and are dense"


def _overlapping(model: Units) -> Iterator[str]:
    """Tensors that are several and have memory in common: an engine would give each its own."""
    ranges = dict[int, tuple[int, int, str]]()
    for unit in model.units:
        for name, tensor in unit.tensors():
            if not tensor.is_meta and tensor.numel() and tensor.is_contiguous():
                ranges.setdefault(id(tensor), (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    for (_, stop, name), (start, _, other) in pairwise(sorted(ranges.values())):
        if start < stop:
            yield (
                f"{name} and {other} are two tensors in one memory: of an engine each has memory of its own. Let both "
                "be one parameter, or one of them a copy"
            )


def chunks_of_units(model: Units, run: Run) -> tuple[range, ...]:
    """The numbers of the units of each model chunk, in model order."""
    return chunk_units(run, [sum(each.numel() for each in unit.module.parameters()) for unit in model.units])


def sharing_stages(model: Units, run: Run) -> tuple[int, ...]:
    """The stages with parameters that other stages have too, in order."""
    on = [stages for stages in _stages_of(model, run, chunks_of_units(model, run)).values() if len(stages) > 1]
    return tuple(sorted(set[int]().union(*on)))


def _stages_of(model: Units, run: Run, chunks: Sequence[range]) -> dict[str, set[int]]:
    """The stages that have each parameter."""
    stages, holders = dict[str, set[int]](), chunks_of(run)
    for model_chunk, units in enumerate(chunks):
        for name in _names_in(model, units):
            stages.setdefault(name, set()).add(holders.holder(model_chunk)[0])
    return stages


def _names_in(model: Units, units: range) -> list[str]:
    return [model.names[id(each)] for number in units for each in model.units[number].parameters()]


def tied_names(model: Units, run: Run, chunks: Sequence[range]) -> set[str]:
    """The names of parameters that several stages have."""
    return {name for name, on in _stages_of(model, run, chunks).items() if len(on) > 1}


def held_parameters(model: Units, run: Run, chunks: Sequence[range], tied: Set[str]) -> dict[int, list[nn.Parameter]]:
    """What units hold of others, by number. All stages with parameters that several stages have (tied) get all of
    these, in their first chunk with any: as one bucket, which all these stages have alike. Where nothing uses one, its
    gradient is zero.
    """
    by_name = {model.names[id(each)]: each for unit in model.units for each in unit.parameters()}
    held = dict[int, list[nn.Parameter]]()
    for stage in range(run.parallel.pp):
        own = [chunks[number] for number in chunks_of(run).of(stage)]
        units = next((units for units in own if not tied.isdisjoint(_names_in(model, units))), None)
        if units is None:
            continue
        first = next(number for number in units if not tied.isdisjoint(_names_in(model, range(number, number + 1))))
        held[first] = [by_name[name] for name in sorted(tied - set(_names_in(model, units)))]
    return held


def hold_together(model: Units, held: Mapping[int, Iterable[nn.Parameter]]) -> None:
    """Have units hold parameters of others, by number."""
    for number, parameters in held.items():
        model.units[number].hold(parameters)


def inventory_of(
    model: Units,
    tied: Set[str],
    held: Mapping[int, Sequence[nn.Parameter]],
    plan: ResolvedPlan,
    *,
    has_several_dtypes: bool,
) -> list[list[ParameterShape]]:
    """The parameters of each unit. tied: names of those that several stages have. held: what units will hold of others,
    by number. plan: how they are cut among tp ranks. has_several_dtypes: whether each keeps its dtype.
    """
    whole = {model.names[id(each)] for unit in model.units if unit.keeps_whole for each in unit.parameters()}

    def shape_of(parameter: nn.Parameter) -> ParameterShape:
        name = model.names[id(parameter)]
        return ParameterShape(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            is_tied=name in tied,
            keep_whole=name in whole,
            split=plan.splits.get(name),
            is_partial=name in plan.partial,
            dtype=parameter.dtype if has_several_dtypes else None,
        )

    return [
        [shape_of(parameter) for parameter in (*unit.parameters(), *held.get(number, ()))]
        for number, unit in enumerate(model.units)
    ]


def structure_digest(model: Units) -> int:
    """What is equal where models have the same units, with the same names, shapes and dtypes."""
    digest = 0
    for unit in model.units:
        for name, tensor in unit.tensors():
            words = f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
            digest = zlib.crc32(words.encode(), digest)
        plans = [getattr(module, PLAN, None) for module in unit.module.modules()]
        digest = zlib.crc32(f"{unit.name} {type(unit.module).__name__} {plans}".encode(), digest)
    return zlib.crc32(f"{model.tp_plan} {model.is_proven}".encode(), digest)


def values_digest(model: Units, *, trained: bool = True) -> int:
    """What is equal where models begin with the same values. All of them are read; of what is on the meta device
    torch's seed counts, which makes them.

    trained: whether parameters that are trained count, too
    """
    every = (named for unit in model.units for named in unit.tensors())
    tensors = {name: tensor for name, tensor in every if trained or not tensor.requires_grad}
    blank = any(tensor.is_meta for tensor in tensors.values())
    digest = zlib.crc32(str(torch.initial_seed() if blank else 0).encode())
    for tensor in tensors.values():
        if not tensor.is_meta:
            digest = tensor_digest(tensor, digest)
    return digest
