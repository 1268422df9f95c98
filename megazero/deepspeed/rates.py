"""The schedules of a configuration: rates, and with OneCycle momentum, of the groups of an optimizer's parameters.

Formulas and defaults are those of DeepSpeed 0.19.8 (runtime/lr_schedules.py; its documentation describes them under
"Learning Rate Schedulers"). There WarmupLR, WarmupDecayLR and WarmupCosineLR begin one step late: the first two steps
have the same rate. OneCycle is Smith's policy (2018, arXiv:1803.09820), as is the test for a range of rates
(LRRangeTest). Other names are those of `torch.optim.lr_scheduler`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]
SECOND_BETA = 0.99
"""Adam's second beta while OneCycle has the first."""

# --- formulas: from the number of a step, -1 at first, and the optimizer's rate. Others of their arguments are keys ---


def _warmed_up(step: int, steps: int, warmup_type: str) -> float:
    """The share of the way from the lowest rate to the highest one, of a step of so many."""
    return step / steps if warmup_type == "linear" else math.log(step + 1) / math.log(steps)


def warmup(
    step: int,
    lr: float,
    *,
    warmup_min_lr: float,
    warmup_max_lr: float | None,
    warmup_num_steps: int,
    warmup_type: str,
    total_num_steps: int | None = None,
) -> float:
    """WarmupLR, and with a number of all steps WarmupDecayLR, which goes down to 0."""
    highest, steps = lr if warmup_max_lr is None else warmup_max_lr, max(2, warmup_num_steps)
    share = 1.0
    if step < steps:
        share = 0.0 if step < 0 else _warmed_up(step, steps, warmup_type)
    elif total_num_steps is not None:
        share = max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - steps))
    return warmup_min_lr + (highest - warmup_min_lr) * share


def warmup_cosine(
    step: int,
    lr: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float,
    warmup_num_steps: int,
    cos_min_ratio: float,
    warmup_type: str,
) -> float:
    """WarmupCosineLR."""
    steps = max(2, warmup_num_steps)
    if step < 0:
        return 0.0
    if step < steps:
        return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * _warmed_up(step, steps, warmup_type))
    way = min(1.0, (step - steps + 1) / max(1, total_num_steps - steps))
    return lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * way)) / 2)


def range_test(
    step: int,
    lr: float,
    *,
    lr_range_test_min_lr: float,
    lr_range_test_step_size: int,
    lr_range_test_step_rate: float,
    lr_range_test_staircase: bool,
) -> float:
    """LRRangeTest: the rate grows by the same amount in each interval of steps, at once where it is a staircase."""
    interval = (step + 1) / lr_range_test_step_size
    interval = math.floor(interval) if lr_range_test_staircase else interval
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)


class Cycle(NamedTuple):
    """The one cycle of OneCycle, which goes up in its first steps and down in its second ones.

    stairs  into how many levels each half is divided; 0: every step has its own
    """

    first: float
    second: float
    first_stairs: int
    second_stairs: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Cycle:
        first, second = params["cycle_first_step_size"], params["cycle_second_step_size"]
        stairs, second_stairs = params["cycle_first_stair_count"], params["cycle_second_stair_count"]
        return cls(
            first, first if second is None else second, stairs, stairs if second_stairs is None else second_stairs
        )

    @property
    def steps(self) -> float:
        return self.first + self.second

    def height(self, number: int) -> float:
        """From 0 to 1, of a step by its number from 0 to `steps`."""
        place = number % self.steps
        up = place <= self.first
        share, whole = (place, self.first) if up else (self.steps - place, self.second)
        stairs = self.first_stairs if up else self.second_stairs
        return math.floor(share * stairs / whole) / stairs if stairs else share / whole

    def decay(self, number: int, rate: float, size: float) -> float:
        """1 + rate x intervals behind the cycle; 1 where there is no interval."""
        return 1 + rate * (number - self.steps) / size if size else 1.0


def one_cycle(
    step: int,
    lr: float,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float,
    decay_step_size: float,
    **others: Any,
) -> float:
    """The rate of OneCycle: from the lowest to the highest and back, then less and less."""
    cycle, number = Cycle.of(others), step + 1
    if number <= cycle.steps:
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * cycle.height(number)
    return cycle_min_lr / cycle.decay(number, decay_lr_rate, decay_step_size)


def one_cycle_betas(
    step: int,
    *,
    cycle_min_mom: float,
    cycle_max_mom: float,
    decay_mom_rate: float,
    decay_step_size: float,
    **others: Any,
) -> tuple[float, float]:
    """Adam's betas of OneCycle. The momentum goes down where the rate goes up; the first step has the lowest one."""
    cycle, number = Cycle.of(others), step + 1
    if number == 0:
        return cycle_min_mom, SECOND_BETA
    if number <= cycle.steps:
        return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * cycle.height(number), SECOND_BETA
    return cycle_max_mom * cycle.decay(number, decay_mom_rate, decay_step_size), SECOND_BETA


# --- the keys of a configuration -----------------------------------------------------------------------------------

_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
KINDS: Mapping[str, tuple[Callable[..., float], Mapping[str, Any]]] = MappingProxyType(
    {
        "WarmupLR": (warmup, _WARMUP),
        "WarmupDecayLR": (warmup, {**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": ...}),
        "WarmupCosineLR": (
            warmup_cosine,
            {
                "total_num_steps": ...,
                "warmup_min_ratio": 0.0,
                "warmup_num_steps": 1000,
                "cos_min_ratio": 0.0001,
                "warmup_type": "log",
            },
        ),
        "LRRangeTest": (
            range_test,
            {
                "lr_range_test_min_lr": 1e-3,
                "lr_range_test_step_size": 2000,
                "lr_range_test_step_rate": 1.0,
                "lr_range_test_staircase": False,
            },
        ),
        "OneCycle": (
            one_cycle,
            {
                "cycle_min_lr": ...,
                "cycle_max_lr": ...,
                "decay_lr_rate": 0.0,
                "cycle_first_step_size": 2000,
                "cycle_second_step_size": None,
                "cycle_first_stair_count": 0,
                "cycle_second_stair_count": None,
                "decay_step_size": 0,
                "cycle_momentum": None,
                "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.9,
                "decay_mom_rate": 0.0,
            },
        ),
    }
)
"""By `scheduler.type` its formula, and the keys of `scheduler.params` with DeepSpeed's defaults; ...: there is none."""
PER_GROUP = frozenset(
    "warmup_min_lr warmup_max_lr lr_range_test_min_lr cycle_min_lr cycle_max_lr cycle_min_mom cycle_max_mom".split()
)
"""Keys whose value may be a list, with a number for each group of parameters."""
WORDS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "warmup_type": ("log", "linear"),
        "lr_range_test_staircase": (True, False),
        "cycle_momentum": (True, False, None),
    }
)
"""Keys whose value is no number, and their values."""
POSITIVE = frozenset("warmup_num_steps lr_range_test_step_size cycle_first_step_size".split())
"""Numbers of steps that are 1 at least."""
COUNTS = frozenset(
    "cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size total_num_steps".split()
)
"""Numbers that are 0 at least."""


class GroupRates(NamedTuple):
    """A schedule of a configuration.

    params  every key of it, with a value
    """

    kind: str
    params: Mapping[str, Any]

    def lrs(self, step: int, lrs: Sequence[float]) -> list[float]:
        """The rates of all groups in a step, by its number, -1 at first. lrs: those that the optimizer began with."""
        formula = KINDS[self.kind][0]
        return [formula(step, lr, **self._of_group(number)) for number, lr in enumerate(lrs)]

    def betas(self, step: int, groups: int) -> list[tuple[float, float]] | None:
        """The betas of so many groups in a step; None: the schedule leaves them as they are."""
        if self.kind != "OneCycle" or self.params["cycle_momentum"] is False:
            return None
        return [one_cycle_betas(step, **self._of_group(number)) for number in range(groups)]

    def require_groups(self, groups: int) -> None:
        """Raise ValueError if a list does not have a number for each of so many groups."""
        for name, value in self.params.items():
            if isinstance(value, list) and len(value) != groups:
                raise ValueError(
                    f"scheduler.params.{name} has {len(value)} numbers, and the optimizer {groups} groups of parameters"
                )

    def _of_group(self, number: int) -> dict[str, Any]:
        return {name: value[number] if isinstance(value, list) else value for name, value in self.params.items()}


def rates_of(kind: str, params: Mapping[str, Any]) -> GroupRates:
    """A schedule by its type and its keys. Raises ValueError for what is wrong in them."""
    known = KINDS[kind][1]
    if unknown := sorted(params.keys() - known.keys()):
        raise ValueError(f"there is no scheduler.params.{unknown[0]} of {kind}; valid: {', '.join(known)}")
    every = {**known, **params}
    if missing := [name for name, value in every.items() if value is ...]:
        raise ValueError(f"{kind} needs scheduler.params.{missing[0]}")
    for name, value in every.items():
        of_groups = value if isinstance(value, list) and name in PER_GROUP else [value]
        if name in WORDS:
            if not any(value is valid or (value == valid and isinstance(value, str)) for valid in WORDS[name]):
                valid = ", ".join(str(each).lower() for each in WORDS[name] if each is not None)
                raise ValueError(f"scheduler.params.{name} {value!r}: valid: {valid}")
        elif not all(_is_number(each) or (each is None and known[name] is None) for each in of_groups):
            raise ValueError(f"scheduler.params.{name} {value!r} is no number")
        elif name in POSITIVE and value < 1:
            raise ValueError(f"scheduler.params.{name} {value!r}: a number of steps from 1 on is needed")
        elif name in COUNTS and value is not None and value < 0:
            raise ValueError(f"scheduler.params.{name} {value!r}: a number from 0 on is needed")
    return GroupRates(kind, every)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def schedule_of(scheduler: Mapping[str, Any]) -> MakeSchedule:
    """What makes the schedule of a configuration of an optimizer. Raises ValueError for what is wrong in it."""
    kind, params = scheduler.get("type"), scheduler.get("params") or {}
    if isinstance(kind, str) and kind in KINDS:
        return partial(ConfiguredSchedule, rates=rates_of(kind, params))
    of_torch = getattr(lr_scheduler, kind, None) if isinstance(kind, str) else None
    if not (isinstance(of_torch, type) and issubclass(of_torch, LRScheduler)) or of_torch is ReduceLROnPlateau:
        raise ValueError(
            f"scheduler.type {kind!r} is not built; valid: {', '.join(KINDS)}, and classes of torch.optim.lr_scheduler "
            "but for ReduceLROnPlateau"
        )
    try:
        inspect.signature(of_torch).bind(None, **params)
    except TypeError as error:
        raise ValueError(f"scheduler.params of torch's {kind}: {error}") from error
    return partial(of_torch, **params)


class ConfiguredSchedule(LRScheduler):
    """The schedule of a configuration. It puts the rates, and where it has them the betas, into the optimizer's groups.

    Raises ValueError if the optimizer has other numbers of groups, or no betas and the configuration asks for them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: GroupRates) -> None:
        rates.require_groups(len(optimizer.param_groups))
        self._rates, self._has_betas = rates, "betas" in optimizer.defaults
        if rates.params.get("cycle_momentum") and not self._has_betas:
            raise ValueError(
                f"scheduler.params.cycle_momentum is true, and {type(optimizer).__name__} has no betas, which it would "
                "change: say false, or take an Adam"
            )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [*self._rates.lrs(self.last_epoch - 1, [float(lr) for lr in self.base_lrs])]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        groups = self.optimizer.param_groups
        betas = self._rates.betas(self.last_epoch - 1, len(groups)) if self._has_betas else None
        for group, pair in zip(groups, betas or (), strict=False):
            group["betas"] = pair

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
