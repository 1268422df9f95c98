"""Parameters that are not trained: their values only, without gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megazero.mpu.grid import StateGroups
from megazero.mpu.parameter import Parameter, ParameterSpec, StateGroup, spec_of
from megazero.zero.coded import CodedParameters, Coding, coded_column, frozen_layouts
from megazero.zero.gatherer import WholeParameters
from megazero.zero.layout import BucketLayout, Packing
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
    coding           of matrices that are stored as codes (`zero.coded`); None: none are

    `parameters` has the buckets that are stored as they are, and then those of codes.
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
        coding: Coding | None = None,
    ) -> None:
        self.by_name = parameters_by_name(chunks, trained=False)
        self.layouts = frozen_layouts(specs_by_unit(chunks, trained=False), sizes, placement, packing, coding)
        plain, coded = self.layouts
        buckets = buckets_of(plain, self.by_name, group_of)
        kept = [index for index, layout in enumerate(plain) if layout.kept_whole]
        self.column = StoredColumn(placement, dtype, buckets, device, whole=kept)
        self.parameters = [WholeParameters.adopt(self.column, *each) for each in enumerate(buckets)]
        buckets = buckets_of([layout.numbers for layout in coded], self.by_name, group_of)
        self.codes = coded_column(coded, buckets, placement, device)
        self.parameters += [
            CodedParameters.made(self.codes, index, bucket, layout, dtype)
            for index, (bucket, layout) in enumerate(zip(buckets, coded, strict=True))
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank stores."""
        return self.column.nbytes + self.codes.nbytes

    def fill(self, read: Callable[[ParameterSpec], Tensor]) -> None:
        """Set all values, one bucket after the other, from the global tensors that `read` returns.

        Communicates nothing.
        """
        for at in self.parameters:
            at.fill(read)
