"""A user's model: modules of torch in forward order, with the names of their parameters.

What a unit takes is said by its `forward`: a parameter called `batch` gets the micro-batch, and another one what the
unit before has returned. A parameter that several units have is one, under the name where it comes first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from megazero.mpu.parameter import Parameter
from megazero.own.tensor_parallel.words import TensorParallelPlan
from megazero.system.generators import host_generators_kept

BATCH = "batch"
"""The name of the parameter that gets the micro-batch."""
BatchTensors = Mapping[str, Tensor]
"""A micro-batch, by the names of its tensors."""
Loss = Callable[..., tuple[Tensor, Tensor | float]]
"""From what the last unit returns, and the micro-batch: a 0-dim sum, and the number that it is a sum over."""


class Units:
    """Modules in forward order, whose parameters an engine takes over.

    units        the modules with their names
    unused       whether a step may bring no gradient to a trained parameter
    names        from the number of a parameter (`id`) to its name, which is that in the first unit that has it
    value_units  by the name of a parameter, the first unit that has it and can make its value
    tp_plan      how modules are cut among tp ranks, beside what modules say of themselves
    is_proven    whether the first step computes each unit that is cut as a whole, too, and compares
    is_taken     whether an engine has it
    has_plan_of_family
                 whether the plan is one that transformers has for all models of a family
    """

    def __init__(
        self,
        units: Iterable[Unit],
        *,
        unused: bool,
        tp_plan: TensorParallelPlan | None = None,
        is_proven: bool = True,
    ) -> None:
        self.units, self.unused, self.is_taken = tuple(units), unused, False
        self.has_plan_of_family = False
        self.tp_plan, self.is_proven = {**(tp_plan or {})}, is_proven
        self.names, self.value_units, first_units = dict[int, str](), dict[str, Unit](), dict[str, Unit]()
        for unit in self.units:
            for own, parameter in unit.module.named_parameters():
                name = f"{unit.prefix}{own}"
                if isinstance(parameter, UninitializedParameter):
                    raise ValueError(f"parameter {name} has no shape yet: call its module once before")
                if id(parameter) not in self.names:
                    if (other := first_units.get(name)) is not None:
                        raise ValueError(f"units {other.name!r} and {unit.name!r} both have a parameter {name}")
                    first_units[name], self.names[id(parameter)] = unit, name
                known = self.names[id(parameter)]
                if known not in self.value_units or not self.value_units[known].makes_values:
                    self.value_units[known] = unit

    def keep_dtypes(self, *, keeps: bool) -> None:
        """Take note of whether each parameter keeps its dtype in a run. Modules with this method are told."""
        for unit in self.units:
            if (told := getattr(unit.module, "keep_dtypes", None)) is not None:
                told(keeps=keeps)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of its parameters."""
        every = (parameter for unit in self.units for parameter in unit.parameters())
        return {parameter.dtype for parameter in every if parameter.is_floating_point()}


class Model(Units):
    """A model as a list of units.

        model = megazero.Model([Embed(), Block(), Block(), Head()], loss=cross_entropy)

    units   modules in forward order, or a mapping from their names, such as an `nn.ModuleDict`. A unit returns a
            tensor, or a tuple or dict of tensors, which is what the next one takes. The first one takes the micro-batch
    loss    a function (or module without parameters) of what the last unit returns, and of `batch`: the sum of the
            losses, 0-dim, and the number that it is a sum over. None: the last unit returns these
    input   the name of the tensor of a micro-batch that the first unit takes, if it does not take the whole of it
    unused  whether a step may bring no gradient to a trained parameter, which then counts as zeros. Otherwise that is
            an error of the first step: a parameter without influence is usually a mistake
    named_by_unit
            whether a parameter's name is its unit's and its own, "0.weight", as in a ModuleList or ModuleDict
            of the units. If not, it is its own: for units that are parts of one module, under the names there
    tp_plan from patterns of names to how modules, parameters and numbers of heads are cut among tp ranks
            (`own.tensor_parallel.words`), beside the attribute `tp_plan` of a module, whose names begin there
    is_proven
            whether the first step computes each unit that is cut with whole parameters, too, in float64 where its
            modules take that, and raises ValueError if anything differs. It needs the memory of a whole unit

    Raises TypeError for what is no module, and ValueError for a unit whose `forward` cannot be called so.
    """

    def __init__(
        self,
        units: Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict,
        loss: Loss | None = None,
        *,
        input: str | None = None,
        unused: bool = False,
        named_by_unit: bool = True,
        tp_plan: TensorParallelPlan | None = None,
        is_proven: bool = True,
    ) -> None:
        if isinstance(units, Mapping | nn.ModuleDict):
            named = dict(units.items())
        else:
            named = {str(at): unit for at, unit in enumerate(units)}
        if not named:
            raise ValueError("units is empty: a model has one unit at least")
        for name, unit in named.items():
            if not isinstance(unit, nn.Module):
                raise TypeError(f"unit {name!r} is {type(unit).__name__}: a module of torch is needed")
            if not isinstance(name, str) or not name or "." in name:
                raise ValueError(f"unit {name!r}: the name of a unit is a word without dots")
            if extra := [key for key, value in unit.state_dict().items() if not isinstance(value, Tensor)]:
                raise ValueError(f"unit {name!r} has {extra[0]} in its state_dict, which is no tensor")
            if any(isinstance(parameter, Parameter) for parameter in unit.parameters()):
                raise ValueError(f"unit {name!r} is an engine's already, with its parameters: make another one")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss is {type(loss).__name__}: a function of what the last unit returns is needed")
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ValueError("loss has parameters: a module that is trained is a unit")
        first, last = next(iter(named)), next(reversed(named))
        self.called_units = tuple(
            OwnUnit(
                name,
                unit,
                is_first=name == first,
                input=input,
                loss=loss if name == last else None,
                prefix=f"{name}." * named_by_unit,
            )
            for name, unit in named.items()
        )
        """The units as an engine calls them."""
        super().__init__(self.called_units, unused=unused, tp_plan=tp_plan, is_proven=is_proven)


def from_sequential(
    module: nn.Sequential,
    loss: Loss | None = None,
    *,
    input: str | None = None,
    unused: bool = False,
    tp_plan: TensorParallelPlan | None = None,
    is_proven: bool = True,
) -> Model:
    """The model whose units are the children of an `nn.Sequential`, under their names in it. The other arguments are
    those of `Model`.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"an nn.Sequential is needed, and not a {type(module).__name__}: a list of units makes a Model")
    # named_children() leaves out the second place of a child that has two
    return Model(dict(module._modules), loss, input=input, unused=unused, tp_plan=tp_plan, is_proven=is_proven)


class Unit(nn.Module):
    """A module with its name.

    prefix        what the names of its tensors begin with in the model
    makes_values  whether the module can make values of its parameters that are on the meta device
    keeps_whole   whether its parameters stay whole on every rank with ZeRO-3
    """

    makes_values, keeps_whole = True, False

    def __init__(self, name: str, module: nn.Module, prefix: str) -> None:
        super().__init__()
        self.name, self.module, self.prefix = name, module, prefix

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have parameters of other units beside the module's, which uses none of them."""
        self.held = nn.ParameterList(parameters)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """A context for a computation beside steps: behind it the plain numbers and words that its modules have as
        attributes are as before, such as a count of calls, and so are the generators of Python, NumPy and torch's of
        the host.
        """
        plain = bool | int | float | str | None
        kept = [
            (module, {name: value for name, value in vars(module).items() if isinstance(value, plain)})
            for module in self.modules()
        ]
        with host_generators_kept():
            try:
                yield
            finally:
                for module, values in kept:
                    vars(module).update(values)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of parameters and buffers that a checkpoint has, as `state_dict` of the whole model does."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield f"{self.prefix}{name}", tensor


class OwnUnit(Unit):
    """One of a model's units. `forward` calls the module with what it takes, and behind the last one the loss."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        is_first: bool,
        input: str | None = None,
        loss: Loss | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(name, module, prefix)
        self.input = input if is_first else None
        self._call = _Call.of(f"unit {name!r}", module, begins=is_first and input is None)
        self._loss = None if loss is None else _Call.of("loss", loss)

    @property
    def has_loss(self) -> bool:
        """Whether a loss is called behind the module."""
        return self._loss is not None

    def forward(self, hidden: Any, batch: BatchTensors) -> Any:
        """What the module, and then the loss, returns. hidden: what the unit before has returned, None for the first"""
        if self.input is not None:
            if self.input not in batch:
                raise ValueError(
                    f"the micro-batch has no {self.input!r}, which input= names: it has {', '.join(batch)}"
                )
            hidden = batch[self.input]
        given = self._call(hidden, batch)
        return given if self._loss is None else self._loss(given, batch)


@dataclass(frozen=True)
class _Call:
    """A function, and what it takes: what the unit before returned, and the micro-batch."""

    function: Callable[..., Any]
    takes_hidden: bool
    takes_batch: bool

    @classmethod
    def of(cls, named: str, function: Callable[..., Any], *, begins: bool = False) -> _Call:
        """begins: whether there is none before it. Raises ValueError if it needs more than there is, or takes less."""
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
        kinds = inspect.Parameter
        others = [each for name, each in parameters.items() if name != BATCH and each.kind is not kinds.VAR_KEYWORD]
        needed = [e.name for e in others if e.default is kinds.empty and e.kind is not kinds.VAR_POSITIONAL]
        is_there = f"the micro-batch, as {BATCH!r}" + ("" if begins else ", and what the unit before returns")
        if len(needed) > (not begins):
            hint = "; or say input= of the model, the name of the one tensor that it takes" if begins else ""
            raise ValueError(f"{named} needs {', '.join(needed)}, and there is only {is_there}{hint}")
        if begins and BATCH not in parameters:
            raise ValueError(f"{named} begins the model, and has no parameter {BATCH!r}; or say input= of the model")
        if not begins and all(each.kind is kinds.KEYWORD_ONLY for each in others):
            raise ValueError(f"{named} takes nothing of what the unit before returns")
        return cls(function, not begins, BATCH in parameters)

    def __call__(self, hidden: Any, batch: BatchTensors) -> Any:
        named = {BATCH: batch} if self.takes_batch else {}
        return self.function(hidden, **named) if self.takes_hidden else self.function(**named)
