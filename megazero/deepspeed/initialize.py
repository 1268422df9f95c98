"""`initialize`, and what programs for DeepSpeed call before it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megazero.deepspeed.called import DeepSpeedEngine
from megazero.deepspeed.configuration import Configuration, DeepSpeedSettings, settings_of
from megazero.deepspeed.rates import ConfiguredSchedule, GroupOptimizer, OneGroup
from megazero.own.called_units import RecordedForward, called_units, unit_modules
from megazero.own.opening import Opening, made_with, opening_of
from megazero.own.settings import OF_OUR_OPTIMIZERS
from megazero.own.torch_rule import MakeOptimizer

MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]


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
    optimizer         one of torch with one group of parameters, or what makes one of a list of parameters; None: that
                      of the configuration
    lr_scheduler      one of torch for this optimizer, or what makes one of it; None: that of the configuration, if it
                      has one
    training_data     of which the loader has this rank's part, in micro-batches, in an order of torch's own; None: no
                      loader
    model_parameters  not read: what requires a gradient is trained
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
    given = OneGroup(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if given is not None:
        given.require_all(model)
    make = given.maker() if given is not None else _maker(optimizer) or settings.optimizer
    if make is None:
        raise ValueError("there is no optimizer: hand over optimizer=, or name one in the configuration")
    lr, run = (settings.lr, dict(settings.run)) if isinstance(make, str) else (None, _without_options(settings))
    in_any_order = RecordedForward([], [])  # the first forward has the true one
    units = called_units(model, unit_modules(model), in_any_order)
    opening = opening_of(units, make, lr, run)
    made = made_with(opening, lambda opening: _engine(model, opening, settings, given, lr_scheduler))
    loader = None if training_data is None else _loader(training_data, made, collate_fn)
    return made, made.optimizer, loader, made.lr_scheduler


def _maker(optimizer: object) -> MakeOptimizer | None:
    if optimizer is not None and not callable(optimizer):
        raise ValueError(f"optimizer is {type(optimizer).__name__}: one of torch, or what makes one, is needed")
    return optimizer


def _without_options(settings: DeepSpeedSettings) -> dict[str, Any]:
    """The fields of a run beside an optimizer of the program's own, which has its options."""
    return {name: value for name, value in settings.run.items() if name not in OF_OUR_OPTIMIZERS}


def _engine(
    model: nn.Module,
    opening: Opening,
    settings: DeepSpeedSettings,
    given: OneGroup | None,
    lr_scheduler: LRScheduler | MakeSchedule | None,
) -> DeepSpeedEngine:
    group = OneGroup(GroupOptimizer(model.parameters(), opening.lr)) if given is None else given
    schedule: LRScheduler | None
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau asks for a number in each step: set the rate of the optimizer by hand")
    if isinstance(lr_scheduler, LRScheduler) or lr_scheduler is None:
        schedule = lr_scheduler
    else:
        schedule = lr_scheduler(group.optimizer)
    if schedule is None and settings.rates is not None:
        schedule = ConfiguredSchedule(group.optimizer, settings.rates)
    sizes = settings.batch_sizes(opening.grid.world.size)
    return DeepSpeedEngine(model, opening, sizes, group, schedule, settings.says_every)


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
