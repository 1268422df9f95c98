"""What stands in the place of a module of a model of `transformers` while the model's `forward` runs.

A unit has no use for what other units' modules compute, and no rank has the values of all of them. In their places
stand blanks: zeros in the shapes that the modules make. A look at a model has known numbers there, which show by their
values and gradients what depends on what.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megazero.own.transformers_models.nested import Place, mapped, tensors_at, without_numbers
from megazero.own.units.taken_tensors import META, buffer_dtype

CannotRun = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError, NotImplementedError)
"""What a model raises whose modules are replaced by something that does not fit."""
SHAPES = 16
"""Calls of a module whose shapes are kept."""


class Uncuttable(ValueError):
    """Something that a model does, and that units cannot do."""


class ShapesUnknown(Uncuttable):
    """A module cannot say what shapes it makes. module: which one."""

    def __init__(self, module: nn.Module, words: str) -> None:
        super().__init__(words)
        self.module = module


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A context in which modules do something else when they are called."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward_before in before.items():
            if forward_before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward_before


@dataclass(frozen=True)
class MetaRun:
    """How a module runs on the meta device.

    dtype   of its parameters of floats. None: as they are in the model
    graded  whether what it makes has gradients where the module's has some
    """

    dtype: torch.dtype | None = None
    graded: bool = False


class MetaCopy:
    """The shapes that a module makes, by a copy of it on the meta device, where nothing is computed.

    Called like the module, it returns what that would return: tensors on the meta device. Raises ShapesUnknown for a
    module that cannot run there.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._module = path, module
        blank: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty_like(each, device=META), each.requires_grad)
            for each in module.parameters()
        }
        blank |= {id(each): torch.empty_like(each, device=META) for each in module.buffers()}
        self._copy = copy.deepcopy(module, blank)
        self._copy.__dict__.pop("forward", None)
        self._dtypes = [each.dtype for each in self._copy.parameters()]
        self._seen = dict[Any, Any]()

    def __call__(self, how: MetaRun, *args: Any, **named: Any) -> Any:
        trained = [each.requires_grad for each in self._module.parameters()]
        key = how, tuple(trained), without_numbers((args, named))
        if key not in self._seen:
            for parameter, is_trained in zip(self._copy.parameters(), trained, strict=True):
                parameter.requires_grad_(is_trained)
            while len(self._seen) >= SHAPES:
                del self._seen[next(iter(self._seen))]
            with torch.set_grad_enabled(how.graded):  # a forward that is made again has the same graph
                self._seen[key] = self._made(how.dtype, args, named)
        return self._seen[key]

    def _made(self, dtype: torch.dtype | None, args: Any, named: Any) -> Any:
        given, given_by_name = mapped((args, named), lambda place, tensor: _on_meta(tensor))
        try:
            made = self._in(dtype)(*given, **given_by_name)
        except CannotRun as error:
            raise ShapesUnknown(
                self._module,
                f"{self._path} cannot run on torch's meta device, which says what shapes it makes: {first_line(error)}",
            ) from error
        return mapped(made, lambda place, tensor: _on_meta(tensor))

    def _in(self, dtype: torch.dtype | None) -> nn.Module:
        """The copy with parameters of a dtype."""
        for parameter, own_dtype in zip(self._copy.parameters(), self._dtypes, strict=True):
            wanted = dtype if dtype is not None and parameter.is_floating_point() else own_dtype
            if parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)
        if dtype is not None:
            for module in self._copy.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(buffer_dtype(buffer, dtype))
        return self._copy


def first_line(error: Exception) -> str:
    """Of its message, if it has one."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _on_meta(tensor: Tensor) -> Tensor:
    """As a leaf of no graph."""
    return torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)


class LikeHidden:
    """What a layer returns that makes one hidden state of another, for a layer that cannot run on the meta device.

    template  what it returns: a tree with `HIDDEN` in the place of the hidden state. A layer's other tensors are none
    """

    def __init__(self, template: Any) -> None:
        self.template = template

    def __call__(self, how: MetaRun, *args: Any, **named: Any) -> Any:
        """how: it makes no difference."""
        return self.of(hidden_of(args, named))

    def of(self, hidden: Tensor) -> Any:
        """What a layer returns with this hidden state."""
        return mapped(self.template, lambda place, tensor: hidden)


HIDDEN = torch.empty(0, device=META)
"""The place of the hidden state."""
Shapes = MetaCopy | LikeHidden
"""What says the shapes that a module makes."""


def hidden_of(args: Any, named: Any) -> Tensor:
    """The hidden state among the arguments of a layer."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    if not args and "hidden_states" in named:
        hidden: Tensor = named["hidden_states"]
        return hidden
    return next(iter(tensors_at((args, named)).values()))


def blank_forward(shapes: Shapes, how: MetaRun, device: torch.device) -> Callable[..., Any]:
    """A module's `forward` that makes zeros."""

    def zeros(place: Place, tensor: Tensor) -> Tensor:
        has_gradient = how.graded and tensor.requires_grad
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=has_gradient)

    return lambda *args, **named: mapped(shapes(how, *args, **named), zeros)


class KnownNumbers:
    """A module's `forward` that makes numbers, which depend on all that it gets, and on a `gain` in the place of its
    parameters.

    variant  numbers of another variant are others
    gain     0-dim float64, with a gradient
    """

    def __init__(self, path: str, shapes: Shapes, device: torch.device, variant: int) -> None:
        self._shapes, self._device, self._words = shapes, device, f"{path} {variant}"
        self._path = path
        self.gain = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)

    def __call__(self, *args: Any, **named: Any) -> Any:
        read = self._read((args, named))

        def numbers(place: Place, tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            return (self.gain * _drawn(tensor, f"{self._words} {place}", self._device) + read).to(tensor.dtype)

        return mapped(self._shapes(MetaRun(), *args, **named), numbers)

    def _read(self, tree: Any) -> Tensor:
        """A number from all tensors in a tree. Masks have large ones, which would hide the others."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for place, tensor in tensors_at(tree).items():
            values = tensor.to(self._device, torch.float64).nan_to_num().clamp(-8, 8)
            weights = _drawn(tensor, f"{self._path} reads {place}", self._device)
            total = total + (values * weights).sum() / max(1, tensor.numel()) ** 0.5
        return torch.sin(total)


def _drawn(like: Tensor, words: str, device: torch.device) -> Tensor:
    """Normal numbers in float64 in a tensor's shape: the same for the same words."""
    generator = torch.Generator().manual_seed(zlib.crc32(words.encode()))
    return torch.randn(like.shape, dtype=torch.float64, generator=generator).to(device)
