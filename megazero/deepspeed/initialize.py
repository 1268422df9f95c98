"""`initialize`, and what programs for DeepSpeed call before it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megazero.deepspeed.called import DeepSpeedEngine
from megazero.deepspeed.configuration import Configuration, DeepSpeedSettings, settings_of
from megazero.deepspeed.groups import GivenParameters, GroupOptimizer, ParameterGroups
from megazero.deepspeed.rates import MakeSchedule
from megazero.own.called_units import RecordedForward, called_units, unit_modules
from megazero.own.opening import Opening, made_with, opening_of
from megazero.own.settings import OF_OUR_OPTIMIZERS
from megazero.own.torch_rule import MakeOptimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | MakeSchedule | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Configuration | None = None,
    config_params: Configuration | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer, DataLoader[Any] | None, LRScheduler | None]:
    """(engine, optimizer, loader, schedule) as of `deepspeed.initialize`.

    config            a file or its content; None: config_params, or args.deepspeed_config
    optimizer         one of torch, or what makes one of `model_parameters`; None: that of the configuration. Of its
                      groups of parameters each has its own rate and other options
    lr_scheduler      one of torch for this optimizer, or what makes one of it; None: that of the configuration, if it
                      has one
    training_data     of which the loader has this rank's part, in micro-batches, in an order of torch's own; None: no
                      loader
    model_parameters  what torch takes for an optimizer: parameters or groups of them with options; None: what requires
                      a gradient. All that requires one is among them
    dist_init_required
                      not read: process groups are made beside a default group, or with one

    A collective of all ranks. Raises ConfigError with everything that is wrong in the configuration, and ValueError for
    the other arguments.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"initialize needs model=, a module, and got {type(model).__name__}")
    config = config if config is not None else config_params or getattr(args, "deepspeed_config", None)
    if config is None:
        raise ValueError("initialize needs config=, a file or its content")
    settings = settings_of(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = trained if model_parameters is None else list(model_parameters)
    given = _given(optimizer, parameters)
    make: str | MakeOptimizer | None = settings.optimizer
    if given is not None:
        given.require_all(model)
        make = given.maker() if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if make is None:
        raise ValueError("there is no optimizer: hand over optimizer=, or name one in the configuration")
    lr, run = (settings.lr, dict(settings.run)) if isinstance(make, str) else (None, _without_options(settings))
    in_any_order = RecordedForward([], [])  # the first forward has the true one
    units = called_units(model, unit_modules(model), in_any_order)
    opening = opening_of(units, make, lr, run, groups=({},) if given is None else given.options())

    def engine(opening: Opening) -> DeepSpeedEngine:
        groups = given or ParameterGroups(GroupOptimizer(parameters, opening.run.optimizer, opening.lr))
        groups.require_all(model)
        return _engine(model, opening, settings, groups, lr_scheduler)

    made = made_with(opening, engine)
    loader = None if training_data is None else _loader(training_data, made, collate_fn)
    return made, made.optimizer, loader, made.lr_scheduler


def _given(optimizer: object, parameters: GivenParameters) -> ParameterGroups | None:
    """The groups of an optimizer of the program's own; None: it has none."""
    if isinstance(optimizer, torch.optim.Optimizer) or optimizer is None:
        return None if optimizer is None else ParameterGroups(optimizer)
    if not callable(optimizer):
        raise ValueError(f"optimizer is {type(optimizer).__name__}: one of torch, or what makes one, is needed")
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer makes a {type(made).__name__}: a torch.optim.Optimizer is needed")
    return ParameterGroups(made)


def _without_options(settings: DeepSpeedSettings) -> dict[str, Any]:
    """The fields of a run beside an optimizer of the program's own, which has its options."""
    return {name: value for name, value in settings.run.items() if name not in OF_OUR_OPTIMIZERS}


def _engine(
    model: nn.Module,
    opening: Opening,
    settings: DeepSpeedSettings,
    groups: ParameterGroups,
    lr_scheduler: LRScheduler | MakeSchedule | None,
) -> DeepSpeedEngine:
    schedule: LRScheduler | None
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau asks for a number in each step: set the rate of the optimizer by hand")
    if isinstance(lr_scheduler, LRScheduler) or lr_scheduler is None:
        schedule = lr_scheduler
    else:
        schedule = lr_scheduler(groups.optimizer)
    if schedule is None and settings.schedule is not None:
        schedule = settings.schedule(groups.optimizer)
    sizes = settings.batch_sizes(opening.grid.world.size)
    return DeepSpeedEngine(model, opening, sizes, groups, schedule, settings.says_every)


def _loader(data: Dataset[Any], engine: DeepSpeedEngine, collate: Any) -> DataLoader[Any]:
    sampler = DistributedSampler[Any](data, engine.world_size, engine.global_rank, shuffle=True)
    return DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate)


def init_distributed(dist_backend: str | None = None, **details: Any) -> None:
    """Make torch's default process group, if there is none: as `torch.distributed.init_process_group`."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(dist_backend, **details)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags by which programs for DeepSpeed take their configuration."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="says that the program uses DeepSpeed, to the program")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, a file in JSON")
    return parser
