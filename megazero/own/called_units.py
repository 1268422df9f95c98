"""The units of a module of any kind: which of its parts they are, in which order its forward calls them, and what it
uses of their parameters outside of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megazero.own.units.model import Unit, Units
from megazero.own.units.taken_tensors import NO_USE, name_of_function
from megazero.system.generators import torch_generators_kept

META = torch.device("meta")
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that others go through. Each child of one is a unit."""
OUTSIDE = "(outside of units)"
"""The name of the unit that has what is used outside of all others."""


def unit_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The units of a module by their paths: children of lists, and of what holds a list; otherwise the module's own
    children. Of a module that is there twice the first path.
    """
    units = dict[str, nn.Module]()
    for path, unit in _within("", module):
        if unit not in units.values() and any(True for _ in _tensors_of(unit)):
            units[path] = unit
    return units


def _within(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        holds_list = not isinstance(module, LISTS) and any(isinstance(each, LISTS) for each in child.modules())
        if isinstance(child, LISTS) or holds_list:
            yield from _within(inner, child)
        else:
            yield inner, child


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class RecordedForward(NamedTuple):
    """What a forward of a module does.

    order    paths of the units that it calls, a path twice where the unit is called twice
    outside  names of parameters that it uses where none of their units is under way
    """

    order: list[str]
    outside: list[str]


def recorded_forward(
    module: nn.Module, units: Mapping[str, nn.Module], args: Sequence[Any], named: Mapping[str, Any]
) -> RecordedForward:
    """A forward of a module, on torch's meta device. A module that does not run there is run as it is, without
    gradients; its buffers and torch's generators are behind it as before. Raises what the module raises then.
    """
    tensors = dict[str, Tensor]([*module.named_parameters(), *module.named_buffers()])
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    try:
        with (
            _unchanged(module, device),
            torch.no_grad(),
            _blank(module) as blank,
            _Recording(module, units, blank) as recording,
        ):
            module(*_moved(tuple(args), META), **_moved(dict(named), META))
    except Exception:  # whatever a module does of a tensor without numbers
        with _Recording(module, units, tensors) as recording, _unchanged(module, device), torch.no_grad():
            module(*_moved(tuple(args), device), **_moved(dict(named), device))
    return recording.recorded


class _Recording(TorchFunctionMode):
    """A context that records a forward. tensors: with which the module computes in it, by name."""

    def __init__(self, module: nn.Module, units: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.recorded, self._units = RecordedForward([], []), units
        self._names = {id(tensors[name]): name for name, _ in module.named_parameters()}
        here = {id(parameter): name for name, parameter in module.named_parameters()}
        self._of_unit = {path: {here[id(each)] for each in unit.parameters()} for path, unit in units.items()}
        self._under_way: list[str] = []

    def __enter__(self) -> _Recording:
        super().__enter__()
        self._hooks = [hook for path, unit in self._units.items() for hook in self._hooked(path, unit)]
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def _hooked(self, path: str, unit: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        def begin(*_: Any) -> None:
            self.recorded.order.append(path)
            self._under_way.append(path)

        def end(*_: Any) -> None:
            self._under_way.pop()

        yield unit.register_forward_pre_hook(begin)
        yield unit.register_forward_hook(end)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of_function(function) not in NO_USE:
            for tensor in tensors_in((args, kwargs or {})):
                name = self._names.get(id(tensor))
                is_inside = any(name in self._of_unit[path] for path in self._under_way)
                if name is not None and not is_inside and name not in self.recorded.outside:
                    self.recorded.outside.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def _blank(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context with a module's tensors on the meta device, by name. (`torch.func.functional_call` leaves a module that
    is there under two names with the tensors that it was given.)
    """
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    registries = [registry for part in module.modules() for registry in (part._parameters, part._buffers)]
    before = [(registry, name, each) for registry in registries for name, each in registry.items() if each is not None]
    blank = {names[id(each)]: each.detach().to(META) for _, _, each in before}
    try:
        for registry, name, each in before:
            registry[name] = blank[names[id(each)]]  # type: ignore[assignment]  # no parameter, for a while
        yield blank
    finally:
        for registry, name, each in before:
            registry[name] = each  # type: ignore[assignment]


@contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A context behind which a module's buffers and torch's generators are as before."""
    before = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    with torch_generators_kept(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a forward without gradients says: the program has not asked for that one
        yield
    with torch.no_grad():
        for registry, name, buffer, value in before:
            registry[name] = buffer.copy_(value)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)(*(_moved(each, device) for each in value))
    return type(value)(_moved(each, device) for each in value) if isinstance(value, list | tuple) else value


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a value, in containers and in attributes of its objects, so many deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type):
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple | set):
            inner = value
        else:
            inner = getattr(value, "__dict__", {}).values()
        for each in inner:
            yield from tensors_in(each, depth - 1)


class CalledUnit(Unit):
    """A part of a module. named: the names of its tensors in the module's `state_dict`, with its own names of them"""

    def __init__(self, path: str, module: nn.Module, named: Mapping[str, str]) -> None:
        super().__init__(path, module, f"{path}." if path else "")
        self._named = named

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        every = self.module.state_dict(keep_vars=True)
        for name, own in self._named.items():
            yield name, every[own]


class OutsideUnit(CalledUnit):
    """What is used outside of all other units. Its parameters stay whole on every rank.

    whole  the module, in which a program may have put other buffers since then
    """

    makes_values, keeps_whole = False, True

    def __init__(self, whole: nn.Module, tree: nn.Module, named: Mapping[str, str]) -> None:
        super().__init__("", tree, named)
        self.name, self._whole = OUTSIDE, (whole,)  # in a tuple: it is no part of the unit

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        every = self._whole[0].state_dict(keep_vars=True)
        for name in self._named:
            yield name, every[name]


def called_units(module: nn.Module, units: Mapping[str, nn.Module], recorded: RecordedForward) -> Units:
    """The units of a module in the order of their calls. One that is not called is behind the one that the module has
    before it. In front of all is the one with what is used outside of them, if anything is. A further call of a unit is
    a unit without tensors of its own.
    """
    tensors = dict[str, Tensor]([*module.named_parameters(), *module.named_buffers()])
    in_units = {id(tensor) for unit in units.values() for tensor in _tensors_of(unit)}
    outside = {name: each for name, each in tensors.items() if name in recorded.outside or id(each) not in in_units}
    every = module.state_dict(keep_vars=True)
    left = {name: id(tensor) for name, tensor in every.items() if isinstance(tensor, Tensor)}

    def named(of: nn.Module) -> dict[str, str]:
        """The names of a unit's tensors in the module, which no later unit has."""
        own = {id(tensor): name for name, tensor in of.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
        mine = {name: own[number] for name, number in left.items() if number in own}
        for name in mine:
            del left[name]
        return mine

    made = list[Unit]()
    for path in _with_uncalled(recorded.order, units):
        made.append(CalledUnit(path, units[path], named(units[path])))
    if outside:
        tree = _tree(module, outside)
        made.insert(0, OutsideUnit(module, tree, named(tree)))
    return Units(made, unused=True)


def _with_uncalled(order: Sequence[str], units: Iterable[str]) -> list[str]:
    """An order of calls with all units, each of which may be called by other data."""
    every, place = list(order), 0
    for path in units:
        if path not in every:
            every.insert(place, path)
        place = every.index(path) + 1
    return every


def _tree(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module with these tensors alone, under the names that they have in another one."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, own = name.split(".")
        part = root
        for step in path:
            if step not in part._modules:
                part.add_module(step, nn.Module())
            part = getattr(part, step)
        if isinstance(tensor, nn.Parameter):
            part.register_parameter(own, tensor)
        else:
            keeps = own not in module.get_submodule(".".join(path))._non_persistent_buffers_set
            part.register_buffer(own, tensor, persistent=keeps)
    return root


def reconnect(module: nn.Module, tree: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Put the tensors of a tree that an engine has taken into the module, wherever it has those from before.

    before: the tree's tensors, by name, before the engine took them
    """
    taken = {id(before[name]): each for name, each in (*tree.named_parameters(), *tree.named_buffers())}
    for part in module.modules():
        for registry in (part._parameters, part._buffers):
            for own, tensor in list(registry.items()):
                if id(tensor) in taken:
                    setattr(part, own, taken[id(tensor)])
