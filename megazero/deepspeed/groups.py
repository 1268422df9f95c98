"""The groups of parameters of a program's optimizer, with their options: the rate, weight decay, betas.

The optimizer is a table that the program and its schedules write into, as they do in plain torch. The engine reads it
in each step, and updates.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.schema import OptimizerConfig
from megazero.own.named_groups import OPTIONS
from megazero.own.torch_rule import MakeOptimizer
from megazero.own.units.refusals import learning_rate

NO_OPTIONS = frozenset({"params", "param_names", "initial_lr"})
"""What torch keeps in a group beside the options of an update."""
UNBUILT = frozenset("amsgrad maximize nesterov dampening momentum betas eps bias_correction adam_w_mode".split())
"""Options of optimizers of torch and DeepSpeed that a group may not have where our optimizer has none of this name."""
Options = dict[str, Any]
GivenParameters = Iterable[Any]
"""What torch takes for an optimizer: parameters, (name, parameter), or groups, each a dict with `params`."""


class GroupOptimizer(torch.optim.Optimizer):
    """What `initialize` returns as optimizer, if the configuration has it. It has groups of parameters with options of
    the names that torch has for them, and updates nothing: the engine does.

    Raises ValueError for an option that the configuration's optimizer does not have.
    """

    def __init__(self, parameters: GivenParameters, cfg: OptimizerConfig, lr: float) -> None:
        named = OPTIONS[cfg.optimizer]
        values = {option: tuple(getattr(cfg, field) for field in fields) for option, fields in named.items()}
        options = {option: both if len(both) > 1 else both[0] for option, both in values.items()}
        super().__init__(parameters, {"lr": lr, **options})
        for number, group in enumerate(self.param_groups):
            if wrong := sorted(name for name in UNBUILT & group.keys() - named.keys() if group[name]):
                valid = ", ".join(("lr", *named))
                raise ValueError(f"group {number} of parameters has {wrong[0]}; {cfg.optimizer} has {valid}")

    @property
    def fields(self) -> Mapping[str, tuple[str, ...]]:
        """The fields of `OptimizerConfig` that its options are."""
        return next(named for named in OPTIONS.values() if named.keys() == self.defaults.keys() - {"lr"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of two overloads the one that is used
        """Does nothing."""


class ParameterGroups:
    """The groups of an optimizer.

    Raises ValueError where options have changed of which an update was made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        names = [set(group) - NO_OPTIONS for group in optimizer.param_groups]
        if isinstance(optimizer, GroupOptimizer):
            names = [{"lr", *optimizer.fields} for _ in names]
        self._names = names
        self._begun_with = self._read()

    def _read(self) -> list[Options]:
        groups = self.optimizer.param_groups
        if len(groups) != len(self._names):
            raise ValueError(
                f"the optimizer has {len(groups)} groups of parameters now, and had {len(self._names)} when the engine "
                "was made"
            )
        every = [
            {name: _plain(group[name]) for name in names} for group, names in zip(groups, self._names, strict=True)
        ]
        for number, options in enumerate(every):
            options["lr"] = learning_rate(options["lr"])
            betas = options.get("betas", ())
            if not all(0 <= beta < 1 for beta in betas):
                raise ValueError(f"betas of group {number} are {betas}: numbers from 0 on, below 1, are needed")
        return every

    @property
    def lrs(self) -> list[float]:
        """The rates of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def options(self) -> list[Options]:
        """The options of each group in the next step, as an optimizer of torch has them."""
        every = self._read()
        for number, (now, begun) in enumerate(zip(every, self._begun_with, strict=True)):
            for name in sorted(now):
                if now[name] != begun[name] and not _are_numbers(now[name]):
                    raise ValueError(
                        f"{name} of group {number} is {now[name]} now, and was {begun[name]} when the engine was made: "
                        "of a group's options those that are numbers can change"
                    )
        return every

    def for_update(self) -> tuple[Options, ...]:
        """The same, as `UpdateValues.groups` has them."""
        if not isinstance(self.optimizer, GroupOptimizer):
            return tuple(self.options())
        fields = {"lr": ("lr",), **self.optimizer.fields}

        def of_ours(options: Options) -> Options:
            every = {name: values if isinstance(values, tuple) else (values,) for name, values in options.items()}
            return {each: value for name in every for each, value in zip(fields[name], every[name], strict=True)}

        return tuple(map(of_ours, self.options()))

    def to_save(self) -> list[Options]:
        """What a checkpoint has of each group: the rate, and what is another number than in the beginning."""
        both = zip(self.options(), self._begun_with, strict=True)
        return [
            {name: now[name] for name in sorted(now) if name == "lr" or now[name] != begun[name]} for now, begun in both
        ]

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint has. Raises ValueError for one of other groups."""
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise ValueError(
                f"the checkpoint is of an optimizer with {len(saved)} groups of parameters, and this one has "
                f"{len(groups)}"
            )
        for group, options in zip(groups, saved, strict=True):
            group.update({name: _plain(value) for name, value in options.items()})

    def maker(self) -> MakeOptimizer:
        """What makes optimizers of this class, with the options of the first group. Raises ValueError where that would
        be another one: of options that nobody can read, or of steps that it has made.
        """
        kind = type(self.optimizer)
        states = self.optimizer.state.values()
        if any(float(state.get("step", 1)) > 0 for state in states if state):  # some are made with an empty sum
            raise ValueError(
                f"{kind.__name__} has made steps already, whose state the engine would not have: hand over a new one"
            )
        given = {**self.optimizer.defaults, **self._begun_with[0]}
        options = Options()
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

    # --- which parameters they have --------------------------------------------------------------------------------

    def _numbers(self) -> dict[int, int]:
        """The number of its group by that of a parameter (`id`)."""
        groups = enumerate(self.optimizer.param_groups)
        return {id(parameter): number for number, group in groups for parameter in group["params"]}

    def require_all(self, module: nn.Module) -> None:
        """Raise ValueError if the groups do not have the parameters of a module that are trained, or have others."""
        held = self._numbers().keys()
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if missing := [name for name, parameter in trained.items() if id(parameter) not in held]:
            raise ValueError(
                f"the optimizer does not have {missing[0]} ({len(missing)} of the {len(trained)} parameters that the "
                "module trains): freeze what it is not to train, by requires_grad_(False), or hand all of them over"
            )
        if len(held) > len({id(parameter) for parameter in module.parameters()} & held):
            raise ValueError("the optimizer has parameters that are none of the module's, which nobody would update")

    def by_name(self, names: Mapping[int, str]) -> dict[str, int]:
        """The number of each parameter's group by its name. names: from the number of a parameter (`id`)."""
        return {names[known]: number for known, number in self._numbers().items() if known in names}

    def places(self, module: nn.Module) -> list[list[str]]:
        """The names in a module of the parameters of each group."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [[names[id(each)] for each in group["params"]] for group in self.optimizer.param_groups]

    def hold(self, module: nn.Module, places: Sequence[Sequence[str]]) -> None:
        """Have the parameters that a module has now at these places."""
        for group, names in zip(self.optimizer.param_groups, places, strict=True):
            group["params"] = [module.get_parameter(name) for name in names]


def _plain(value: Any) -> Any:
    """An option without a tensor that changes in place, and with tuples for lists, which JSON makes of them."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _are_numbers(value: Any) -> bool:
    each = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, int | float) and not isinstance(part, bool) for part in each)
