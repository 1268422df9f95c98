"""`deepspeed.zero` of a program for DeepSpeed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megazero.own.hooked_engine import HookedEngine

HOLDER = "held_by_engine"
"""The attribute of a parameter that says which engine has it."""


class Init(AbstractContextManager[None]):
    """A context whose modules have no values and take no memory. The first forward makes each unit's values with the
    methods `reset_parameters` of its modules.

    enabled              False: modules have values and memory
    dtype                that of parameters; None: torch's default
    config_dict_or_path  what `initialize` gets too; nothing is read here
    """

    def __init__(
        self, *, enabled: bool = True, dtype: torch.dtype | None = None, config_dict_or_path: Any = None
    ) -> None:
        self._dtype, self._device = dtype if enabled else None, torch.device("meta") if enabled else None

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._dtype is not None:
            torch.set_default_dtype(self._dtype)
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*raised)
        torch.set_default_dtype(self._before)


class Holder:
    """The engine that has a parameter. A copy of it, or one in a file, is nobody's.

    replaced  whether the engine has made another parameter in its place
    """

    def __init__(self, engine: HookedEngine | None = None, *, replaced: bool = False) -> None:
        self._engine, self.replaced = None if engine is None else weakref.ref(engine), replaced

    @property
    def engine(self) -> HookedEngine | None:
        return None if self._engine is None else self._engine()

    def __reduce__(self) -> tuple[type[Holder], tuple[()]]:
        return Holder, ()


def mark(module: nn.Module, before: Iterable[nn.Parameter], engine: HookedEngine | None) -> None:
    """Say of a module's parameters which engine has them (None: none any more). before: those from before the engine"""
    for parameter in before:
        setattr(parameter, HOLDER, Holder(replaced=True))
    for parameter in module.parameters():
        setattr(parameter, HOLDER, Holder(engine))


class GatheredParameters(AbstractContextManager[None]):
    """A context in which parameters are whole and can be read, also where ZeRO-3 shards them or they have left the
    device. With `modifier_rank` it is there to write into them: what this rank has made of them at its end is that of
    all ranks, and of the optimizer's own weights.

    params         a parameter, or several
    modifier_rank  whose values count; None: nobody writes
    fwd_module     not read: the engine finds out by itself which module uses a parameter of another one
    enabled        False: nothing is done

    Of an engine it comes between two steps. Before the first forward parameters are simply there, and those on the meta
    device (`Init`) get the values that `modifier_rank` writes; what it does not write of a parameter is an error, and a
    parameter of which it writes nothing is made as others are.

    A collective of all ranks, with the same parameters. With a rank that writes it communicates a broadcast of each
    parameter. Raises ValueError for a write without `modifier_rank`, and RuntimeError in the middle of a step.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        self._parameters = list({id(each): each for each in given}.values()) if enabled else []
        self._writer = modifier_rank

    def __enter__(self) -> None:
        of_engines, free = dict[HookedEngine, list[Any]](), list[nn.Parameter]()
        for parameter in self._parameters:
            holder = getattr(parameter, HOLDER, Holder())
            if holder.replaced:
                raise ValueError(
                    f"a parameter of shape {[*parameter.shape]} was on the meta device, and the engine has made "
                    "another one in its place: take it from the module"
                )
            if holder.engine is None:
                free.append(parameter)
            else:
                of_engines.setdefault(holder.engine, []).append(parameter)
        with ExitStack() as contexts:
            for engine, parameters in of_engines.items():
                contexts.enter_context(engine.gathered(parameters, self._writer))
            if free and self._writer is not None:
                contexts.enter_context(_written(free, self._writer))
            self._contexts = contexts.pop_all()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._contexts.__exit__(*raised)


@contextmanager
def _written(parameters: Sequence[nn.Parameter], writer: int) -> Iterator[None]:
    """A context at whose end all ranks have the values of rank `writer` of parameters that no engine has. Communicates
    a broadcast of each over torch's default group.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise RuntimeError("GatheredParameters comes before init_distributed, without which ranks have no messages")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not 0 <= writer < ranks:
        raise ValueError(f"modifier_rank {writer}: there are ranks from 0 to {ranks - 1}")
    blank = {id(parameter) for parameter in parameters if parameter.is_meta}
    for parameter in parameters:
        if parameter.is_meta:
            _swap(parameter, torch.full_like(parameter, torch.nan, device="cpu"))
    yield
    for parameter in parameters:
        if ranks > 1:
            dist.broadcast(parameter.data, writer)
        left = int(parameter.isnan().sum()) if id(parameter) in blank else 0
        if left == parameter.numel() > 0:
            _swap(parameter, torch.empty_like(parameter, device="meta"))
        elif left:
            raise ValueError(
                f"{left} of the {parameter.numel()} elements of a parameter of shape {[*parameter.shape]} have got no "
                "values: it had none before"
            )


def _swap(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter be on the device of a value, with this value, and the same object."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value.detach(), parameter.requires_grad))
