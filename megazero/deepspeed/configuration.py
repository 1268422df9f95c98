"""What a configuration of DeepSpeed says of a program of one's own: the run, sizes of batches, the schedule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.config.deepspeed import deepspeed_source
from megazero.config.source import ConfigError
from megazero.deepspeed.rates import MakeSchedule, schedule_of
from megazero.own.settings import USED
from megazero.system.reading import BOUNDS, Unreadable, json_type, read_json

OF_LOOP = frozenset("lr micro_batch_size global_batch_size log_interval".split())
"""Fields of which the program's own loop makes what they say."""
OF_THE_MODULE = "precision"
"""The field that follows the module's dtype where the configuration has none."""

Configuration = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A configuration, read.

    run          fields of a run, as `megazero.engine` takes them
    optimizer    the name of ours; None: the configuration has none
    lr           the optimizer's learning rate; None: the configuration has none
    schedule     what makes the schedule of an optimizer; None: the configuration has none
    says_every   number of steps between two lines about a step; None: no lines
    whole, micro, accumulation
                 train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps; None: left out
    """

    run: Mapping[str, Any]
    optimizer: str | None
    lr: float | None
    schedule: MakeSchedule | None
    says_every: int | None
    whole: int | None
    micro: int | None
    accumulation: int | None

    def batch_sizes(self, world_size: int) -> tuple[int, int]:
        """(samples of a micro-batch, micro-batches of a step on a rank): as DeepSpeed computes what its three numbers
        leave out (`_set_batch_related_parameters` of its runtime/config.py). Raises ConfigError if they contradict each
        other.
        """
        whole, micro, steps = self.whole, self.micro, self.accumulation
        if whole is None and micro is None:
            raise ConfigError(["train_batch_size or train_micro_batch_size_per_gpu is needed"])
        if whole is not None and micro is not None and steps is None:
            steps = whole // max(1, micro) // world_size
        steps = 1 if steps is None else steps
        if micro is None:
            assert whole is not None, "one of both is there"
            micro = whole // world_size // max(1, steps)
        if min(micro, steps) < 1 or whole not in (None, micro * steps * world_size):
            raise ConfigError(
                [
                    f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x "
                    f"gradient_accumulation_steps {steps} x {world_size} ranks, each from 1 on"
                ]
            )
        return micro, steps


def settings_of(config: Configuration) -> DeepSpeedSettings:
    """A configuration, which is a file or its content. Raises ConfigError with everything that is wrong."""
    name, content = _content_of(config)
    scheduler = content.pop("scheduler", None)
    source = deepspeed_source(name, content)
    problems, schedule = [*source.problems], None
    if isinstance(scheduler, Mapping):
        try:
            schedule = schedule_of(scheduler)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    elif scheduler is not None:
        problems.append(f"{name}: scheduler {scheduler!r:.60} is not a group of settings: {{...}}")
    settings = {**source.defaults.settings, **source.settings}
    unread = sorted(source.settings.keys() - USED - OF_LOOP)
    problems += [f"{source.written[field]}: a module of one's own reads none" for field in unread]
    if problems:
        raise ConfigError(problems)
    run = {field: settings[field] for field in USED & settings.keys() if field != "optimizer"}
    if OF_THE_MODULE not in source.settings:
        run.pop(OF_THE_MODULE, None)
    return DeepSpeedSettings(
        {"micro_batch_order": "horizontal", **run},
        settings.get("optimizer"),
        settings.get("lr"),
        schedule,
        settings.get("log_interval"),
        source.settings.get("global_batch_size"),
        source.settings.get("micro_batch_size"),
        source.accumulation,
    )


def _with_lists(value: Any) -> Any:
    """A value as JSON would hold it: a program writes pairs of numbers as tuples."""
    if isinstance(value, Mapping):
        return {name: _with_lists(each) for name, each in value.items()}
    return [*map(_with_lists, value)] if isinstance(value, tuple | list) else value


def _content_of(config: Configuration) -> tuple[str, dict[str, Any]]:
    """(a name for messages, the content) of a configuration."""
    if isinstance(config, Mapping):
        return "config", _with_lists(config)
    try:
        content = read_json(Path(config), BOUNDS.description, piped=True)
    except Unreadable as reason:
        raise ConfigError([f"config {reason}"]) from reason
    if not isinstance(content, dict):
        raise ConfigError([f"config {os.fspath(config)}: holds no settings, but {json_type(content)}"])
    return os.fspath(config), content
