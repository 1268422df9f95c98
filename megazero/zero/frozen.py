"""Parameters that are not trained: their values only, without gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from megazero.mpu.parameter import Parameter, ParameterSpec, spec_of
from megazero.zero.layout import UNSHARED, pack

FROZEN = "frozen"
"""Their key in a table of bytes by column."""


def parameters_by_name(chunks: Sequence[Sequence[nn.Module]], *, trained: bool) -> dict[str, Parameter]:
    """The trained (or the frozen) parameters of the units of these chunks. One that two chunks share comes once."""
    by_name: dict[str, Parameter] = {}
    for parameter in (p for units in chunks for unit in units for p in unit.parameters() if p.requires_grad == trained):
        spec = spec_of(parameter)
        assert by_name.setdefault(spec.name, cast(Parameter, parameter)) is parameter, (
            f"two parameters are called {spec.name}"
        )
    return by_name


def specs_by_unit(chunks: Sequence[Sequence[nn.Module]], *, trained: bool) -> list[list[list[ParameterSpec]]]:
    """The specs of the trained (or the frozen) parameters by chunk and unit, as `layout.pack` takes them."""
    return [
        [[spec_of(p) for p in unit.parameters() if p.requires_grad == trained] for unit in units] for units in chunks
    ]


class FrozenParameters:
    """The frozen parameters of a rank's chunks, moved into flat buffers. Their values are zero at first.

    They are packed like buckets of a group of one, so that matrices that are multiplied as one (gate and up) stay
    adjacent.
    """

    def __init__(self, chunks: Sequence[Sequence[nn.Module]], device: torch.device, bucket_size: int) -> None:
        self.by_name = parameters_by_name(chunks, trained=False)
        self.nbytes = 0
        for layout in pack(specs_by_unit(chunks, trained=False), UNSHARED, bucket_size):
            dtype = self.by_name[layout.entries[0].spec.name].dtype
            memory = torch.zeros(layout.numel, dtype=dtype, device=device)
            self.nbytes += memory.nbytes
            for entry in layout.entries:
                self.by_name[entry.spec.name].data = memory[entry.offset : entry.stop].view(entry.spec.local_shape)
