"""Parameters that are not trained: their values only, without gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from megazero.mpu.grid import StateGroups
from megazero.mpu.parameter import Parameter, ParameterSpec, StateGroup, spec_of
from megazero.zero.gatherer import WholeParameters
from megazero.zero.layout import BucketLayout, Packing, frozen_sizes, pack
from megazero.zero.placement import Placement
from megazero.zero.storage import Bucket, StoredColumn

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


def buckets_of(
    layouts: Sequence[BucketLayout], by_name: Mapping[str, Parameter], group_of: Callable[[StateGroup], StateGroups]
) -> tuple[Bucket, ...]:
    """The buckets of this rank with these layouts and parameters."""
    return tuple(
        Bucket(layout, tuple(by_name[entry.spec.name] for entry in layout.entries), group_of(layout.group))
        for layout in layouts
    )


class FrozenParameters:
    """The frozen parameters of a rank's chunks, moved into flat buckets without other columns.

    sizes, group_of  the ranks that hold a parameter, by its group: their number, and their process groups
    placement        of the parameter column: sharded with ZeRO-3
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        sizes: Mapping[StateGroup, int],
        group_of: Callable[[StateGroup], StateGroups],
        placement: Placement,
        packing: Packing,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.by_name = parameters_by_name(chunks, trained=False)
        layouts = pack(specs_by_unit(chunks, trained=False), frozen_sizes(sizes, placement), packing)
        self.buckets = buckets_of(layouts, self.by_name, group_of)
        kept = [index for index, layout in enumerate(layouts) if layout.kept_whole]
        self.column = StoredColumn(placement, dtype, self.buckets, device, whole=kept)
        self.parameters = [WholeParameters.adopt(self.column, *each) for each in enumerate(self.buckets)]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank stores."""
        return self.column.nbytes

    def fill(self, write: Callable[[Parameter], None]) -> None:
        """Have `write` write the whole value of each parameter, one bucket after the other. Communicates nothing."""
        for at in self.parameters:
            with at.filling():
                for parameter in at.bucket.parameters:
                    write(parameter)
