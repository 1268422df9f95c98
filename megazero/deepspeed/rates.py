"""The learning rate of a program for DeepSpeed, which the program and its schedules put into the optimizer's group.

The schedules of a configuration are those of DeepSpeed 0.19.8 (runtime/lr_schedules.py). There a schedule begins one
step late: the first two steps have the same rate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from megazero.own.torch_rule import MakeOptimizer


def _warmed_up(step: int, steps: int, warmup_type: str) -> float:
    """The share of the way from the lowest rate to the highest one, of a step of so many."""
    return step / steps if warmup_type == "linear" else math.log(step + 1) / math.log(steps)


def warmup(
    step: int, lr: float, *, min_lr: float, max_lr: float | None, steps: int, warmup_type: str, total: int | None
) -> float:
    """WarmupLR, and with `total` steps WarmupDecayLR, which goes down to 0."""
    highest, steps = lr if max_lr is None else max_lr, max(2, steps)
    share = 1.0
    if step < steps:
        share = 0.0 if step < 0 else _warmed_up(step, steps, warmup_type)
    elif total is not None:
        share = max(0.0, (total - step) / max(1.0, total - steps))
    return min_lr + (highest - min_lr) * share


def warmup_cosine(
    step: int, lr: float, *, total: int, min_ratio: float, steps: int, last_ratio: float, warmup_type: str
) -> float:
    """WarmupCosineLR."""
    steps = max(2, steps)
    if step < 0:
        return 0.0
    if step < steps:
        return lr * (min_ratio + (1 - min_ratio) * _warmed_up(step, steps, warmup_type))
    way = min(1.0, (step - steps + 1) / max(1, total - steps))
    return lr * max(0.0, last_ratio + (1 - last_ratio) * (1 + math.cos(math.pi * way)) / 2)


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": ...},
        "WarmupCosineLR": {
            "total_num_steps": ...,
            "warmup_min_ratio": 0.0,
            "warmup_num_steps": 1000,
            "cos_min_ratio": 0.0001,
            "warmup_type": "log",
        },
    }
)
"""The keys of `scheduler.params` by `scheduler.type`, with DeepSpeed's defaults; ...: there is none."""
Rates = Callable[[int, float], float]
"""From the number of a step, -1 at first, and the optimizer's learning rate to the rate of the step."""


def rates_of(scheduler: Mapping[str, Any]) -> Rates:
    """The schedule of a configuration. Raises ValueError for what is wrong in it."""
    kind, params = scheduler.get("type"), scheduler.get("params") or {}
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"scheduler.type {kind!r} is not built; valid: {', '.join(KINDS)}")
    known = KINDS[kind]
    if unknown := sorted(params.keys() - known.keys()):
        raise ValueError(f"there is no scheduler.params.{unknown[0]} of {kind}; valid: {', '.join(known)}")
    every = {**known, **params}
    if missing := [name for name, value in every.items() if value is ...]:
        raise ValueError(f"{kind} needs scheduler.params.{missing[0]}")
    if every["warmup_type"] not in ("log", "linear"):
        raise ValueError(f"scheduler.params.warmup_type {every['warmup_type']!r}: valid: log, linear")
    for name, value in every.items():
        if (
            name != "warmup_type"
            and value is not None
            and (isinstance(value, bool) or not isinstance(value, int | float))
        ):
            raise ValueError(f"scheduler.params.{name} {value!r} is no number")
    steps, warmup_type = every["warmup_num_steps"], every["warmup_type"]
    if kind == "WarmupCosineLR":
        ratios = {"min_ratio": every["warmup_min_ratio"], "last_ratio": every["cos_min_ratio"]}
        return partial(warmup_cosine, total=every["total_num_steps"], steps=steps, warmup_type=warmup_type, **ratios)
    bounds = {"min_lr": every["warmup_min_lr"], "max_lr": every["warmup_max_lr"]}
    return partial(warmup, total=every.get("total_num_steps"), steps=steps, warmup_type=warmup_type, **bounds)


class ConfiguredSchedule(LRScheduler):
    """The schedule of a configuration."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        self._rates = rates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [self._rates(self.last_epoch - 1, float(self.base_lrs[0]))]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()


class GroupOptimizer(torch.optim.Optimizer):
    """What `initialize` returns as optimizer, if the program has handed over none. It has the one group of parameters
    with its learning rate, and updates nothing: the engine does.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of two overloads the one that is used
        """Does nothing."""


class OneGroup:
    """The group of an optimizer.

    Raises ValueError where the optimizer has several, or options change that its update was made with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if len(optimizer.param_groups) != 1:
            raise ValueError(
                f"optimizer has {len(optimizer.param_groups)} groups of parameters, and ranges of all parameters have "
                "one: hand over an optimizer with one group"
            )
        self.optimizer = optimizer
        self._options = self._read()

    def _read(self) -> dict[str, Any]:
        kept = {"params", "lr", "initial_lr"}
        return {name: value for name, value in self.optimizer.param_groups[0].items() if name not in kept}

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        now = self._read()
        if changed := sorted(name for name in now if name in self._options and now[name] != self._options[name]):
            name = changed[0]
            raise ValueError(
                f"{name} of the optimizer is {now[name]} now, and was {self._options[name]} when the engine was made: "
                "of its options the learning rate alone can change"
            )
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def maker(self) -> MakeOptimizer:
        """What makes optimizers of this class, with these options. Raises ValueError where that would be another one:
        of options that nobody can read, or of steps that it has made.
        """
        kind = type(self.optimizer)
        states = self.optimizer.state.values()
        if any(float(state.get("step", 1)) > 0 for state in states if state):  # some are made with an empty sum
            raise ValueError(
                f"{kind.__name__} has made steps already, whose state the engine would not have: hand over a new one"
            )
        given = {**self.optimizer.defaults, **self._options, "lr": self.lr}
        options = dict[str, Any]()
        for name, parameter in [*inspect.signature(kind).parameters.items()][1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in given and not hasattr(self.optimizer, name):
                raise ValueError(
                    f"{kind.__name__} does not say with which {name} it was made: hand over what makes it, such as "
                    f"functools.partial({kind.__name__}, ...)"
                )
            options[name] = given[name] if name in given else getattr(self.optimizer, name)
        return partial(kind, **options)

    def require_all(self, module: nn.Module) -> None:
        """Raise ValueError if the group does not have the parameters of a module that are trained, or has others."""
        held = {id(parameter) for parameter in self.optimizer.param_groups[0]["params"]}
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if missing := [name for name, parameter in trained.items() if id(parameter) not in held]:
            raise ValueError(
                f"the optimizer does not have {missing[0]} ({len(missing)} of the {len(trained)} parameters that the "
                "module trains): freeze what it is not to train, by requires_grad_(False), or hand all of them over"
            )
        if len(held) > len({id(parameter) for parameter in module.parameters()} & held):
            raise ValueError("the optimizer has parameters that are none of the module's, which nobody would update")

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put an engine's parameters in the places of those from before."""
        self.optimizer.param_groups[0]["params"] = list(parameters)
