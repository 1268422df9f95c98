"""Parameters of an engine that a program reads, or writes into, between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.mpu import collectives
from megazero.mpu.parameter import Parameter, spec_of
from megazero.own.engine_state import FILLED, EngineState

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element, a dtype for its bits."""


class _Seen(NamedTuple):
    """By what a write into a parameter is seen: its memory, torch's count of changes, and the sum of its bits. A write
    into `parameter.data` is not counted.
    """

    memory: int
    version: int
    bits: int

    @classmethod
    def of(cls, parameter: Tensor) -> _Seen:
        numbers = parameter.detach()
        bits = int(numbers.view(INTEGERS[numbers.element_size()]).sum(dtype=torch.int64))
        return cls(numbers.data_ptr(), parameter._version, bits)


@contextmanager
def gathered(engine: EngineState, parameters: Sequence[Parameter], writer: int | None) -> Iterator[None]:
    """A context in which these parameters are whole and up to date. What rank `writer` has made of them at its end is
    broadcast, and becomes the parameters and the weights that the optimizer has of them. Elements that are as they were
    keep the optimizer's weight, of which a parameter of 16 bits is a rounded copy.

    A collective of all ranks, which hand over the same parameters. Communicates what a forward does of them; with a
    writer a broadcast of each, and per bucket what a load does. Raises ValueError on all ranks for a write without a
    writer, and for a parameter that has got other memory.
    """
    grid = engine.grid
    named = {spec_of(parameter).name: parameter for parameter in parameters}
    named = {name: named[name] for name in sorted(named)}
    if writer is not None and writer not in grid.world.ranks:
        raise ValueError(f"modifier_rank {writer}: there are ranks from 0 to {grid.world.size - 1}")
    with engine.state.reading(nn.ParameterList(named.values())):
        before = {name: _Seen.of(parameter) for name, parameter in named.items()}
        yield
        attempt_on_all_ranks(grid.world, grid.device, lambda: _require_allowed(named, before, writer))
        if writer is None:
            return
        values = _with_neighbours(engine, named)
        for name in named:
            collectives.broadcast(values[name], grid.world, grid.world.ranks.index(writer)).wait()
    _write(engine, values, named)
    engine.accept_parameters()


def _require_allowed(named: Mapping[str, Tensor], before: Mapping[str, _Seen], writer: int | None) -> None:
    for name, parameter in named.items():
        if parameter.detach().data_ptr() != before[name].memory:
            raise ValueError(f"parameter {name} has got other memory: write into it, by copy_ under torch.no_grad()")
        if writer is None and _Seen.of(parameter) != before[name]:
            raise ValueError(
                f"parameter {name} has been changed, and nobody has said whose values count: modifier_rank=0 takes "
                "those of rank 0"
            )


def _with_neighbours(engine: EngineState, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Copies of the values of these parameters, and of frozen ones that share a bucket with one of them, which is
    filled as a whole.
    """
    every = dict[str, Parameter](named)
    for at in engine.state.frozen.parameters:
        inside = {spec_of(parameter).name: parameter for parameter in at.bucket.parameters}
        every |= inside if inside.keys() & named.keys() else {}
    return {name: parameter.detach().clone() for name, parameter in every.items()}


@torch.no_grad()
def _write(engine: EngineState, values: Mapping[str, Tensor], named: Mapping[str, Parameter]) -> None:
    """Set the optimizer's weights of these parameters, and the parameters by them. values: the same on all ranks."""

    def fill() -> None:
        for fragments in engine.optimizer.portions(FILLED, trained):
            for fragment in fragments:
                if fragment.spec.name in trained:
                    weight = fragment.weight
                    new = values[fragment.spec.name].view(-1)[fragment.start : fragment.stop].to(weight.device)
                    weight.copy_(torch.where(weight.to(new.dtype) == new, weight, new.to(weight.dtype)))

    grid = engine.grid
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    attempt_on_all_ranks(grid.world, grid.device, fill)
    engine.optimizer.after_load(FILLED, trained)
    for at in engine.state.frozen.parameters:
        if not named.keys().isdisjoint(spec_of(parameter).name for parameter in at.bucket.parameters):
            at.fill(lambda spec: values[spec.name])
