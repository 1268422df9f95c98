"""The parameters and buffers of a user's modules once an engine has taken them.

Parameters stay the objects that they were: a module, an optimizer or a program may have them at other places, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megazero.mpu.parameter import Parameter, ParameterSpec, become_parameter
from megazero.own.units.model import Unit

META = torch.device("meta")


class UnreadParameter(nn.Parameter):
    """One whose numbers are not those of the model now. A use of them is an error.

    reason  words behind the name that say where the numbers are
    """

    reason = ""

    @property
    def known_name(self) -> str:
        """Its name in the model."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of_function(func) not in NO_USE:
            name = next((each.known_name for each in args if isinstance(each, UnreadParameter)), "of the module")
            raise RuntimeError(f"parameter {name} {cls.reason}")
        return super().__torch_function__(func, types, args, kwargs or {})


class BroughtParameter(Parameter):
    """A parameter whose memory is there for the computations of its unit alone."""

    def set_away(self, is_away: bool) -> None:
        self.__class__ = AwayParameter if is_away else BroughtParameter


class AwayParameter(BroughtParameter, UnreadParameter):
    """One without memory: its numbers would be those of freed memory."""

    reason = (
        "is not here: with ZeRO-3, or parameters off the device, it is in the computations of its unit, and in the "
        "context parameters_whole() of the engine"
    )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter {self.spec.name} {[*self.shape]}, which is not here"

    @property
    def known_name(self) -> str:
        return self.spec.name


NO_USE = frozenset(
    "shape dtype device requires_grad ndim is_leaf layout is_meta is_cuda is_cpu is_sparse is_quantized is_nested "
    "grad_fn grad names _version data_ptr size dim numel nelement stride is_floating_point is_complex is_contiguous "
    "element_size untyped_storage __hash__ __len__ requires_grad_ register_hook __set__ __delete__ "
    "register_post_accumulate_grad_hook _backward_hooks output_nr".split()
)
"""Functions and attributes of a tensor that do not read its numbers."""


def name_of_function(function: Any) -> str:
    """That of a function of torch, or of the attribute that it gets."""
    name = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


def take_parameters(
    unit: Unit,
    names: Mapping[int, str],
    specs: Mapping[str, ParameterSpec],
    dtype: torch.dtype | None,
    device: torch.device,
    made: dict[str, Parameter],
    kind: type[Parameter],
) -> None:
    """Make a unit's parameters such as a model state can take, without values. They stay the same objects, but for
    those on the meta device.

    names  from the number of each parameter of the model to its name
    specs  by name
    dtype  of all parameters; None: each keeps its own
    made   those of other units of this rank by name, to which they are added: a shared one is one
    kind   their class
    """
    for module in unit.modules():
        for name, old in list(module._parameters.items()):
            if old is None or isinstance(old, Parameter):
                continue
            known, is_trained, taken = names[id(old)], old.requires_grad, taken_dtype(old, dtype)
            if known not in made:
                if old.is_meta:
                    made[known] = kind(specs[known], taken, device)
                else:
                    become_parameter(old, kind, specs[known], taken, device)
                    if kind is BroughtParameter:  # a graph from before that has saved it would read freed memory
                        torch.autograd.graph.increment_version(old)
                    made[known] = cast(Parameter, old)
                made[known].untyped_storage().resize_(0)  # a model state gives it memory
                made[known].requires_grad_(is_trained)
            if made[known] is not old:
                setattr(module, name, made[known])  # not into the registry alone: an RNN has a list of its own beside


def taken_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """That of a parameter or buffer in a run. dtype: of all parameters; None: each tensor keeps its own."""
    if dtype is None:
        return tensor.dtype
    return dtype if isinstance(tensor, nn.Parameter) else buffer_dtype(tensor, dtype)


def buffer_dtype(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """That of a buffer beside parameters of this dtype: numbers of 16 bits are too coarse for statistics."""
    return dtype if buffer.is_floating_point() and dtype.itemsize > 2 else buffer.dtype


def take_buffers(unit: Unit, dtype: torch.dtype | None, device: torch.device) -> None:
    """Bring the buffers of a unit to a device, in the dtype that they have in a run (`taken_dtype`)."""
    for module in unit.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device, taken_dtype(buffer, dtype))


class ParameterElsewhere(UnreadParameter):
    """One of a unit on another rank, where a module of this rank may have it in a list of its own: its numbers are
    those from before training.
    """

    reason = (
        "is that of a unit on another stage: a module that computes with it has it as an attribute of its own "
        "(self.weight = other.weight), and not in a list"
    )
    own_name: str

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter {self.own_name}, which is on another rank"

    @property
    def known_name(self) -> str:
        return self.own_name


def forget_values(unit: Unit, names: Mapping[int, str]) -> None:
    """Free the memory of the parameters and buffers of a unit that is on another rank, but for parameters that this
    rank has too. names: from the number of each parameter of the model to its name.
    """
    for module in unit.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, Parameter):
                blank = torch.empty(parameter.shape, dtype=parameter.dtype, device=META)
                setattr(module, name, nn.Parameter(blank, parameter.requires_grad))  # an RNN has a list beside
                if type(parameter) is nn.Parameter and not parameter.is_meta:
                    known = names[id(parameter)]
                    parameter.__class__ = ParameterElsewhere
                    cast(ParameterElsewhere, parameter).own_name = known
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=META)
