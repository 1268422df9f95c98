"""Parameters that are not trained: their values only, without gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megazero.config.tiers import Tier
from megazero.mpu.grid import StateGroups
from megazero.mpu.parameter import Parameter, ParameterSpec, StateGroup, spec_of
from megazero.zero.coded import CodedParameters, FrozenLayouts, coded_column
from megazero.zero.gatherer import WholeParameters
from megazero.zero.layout import BucketLayout
from megazero.zero.memories import Tiers
from megazero.zero.parts import Resting
from megazero.zero.sharding import Sharding
from megazero.zero.storage import Bucket, parameter_column

FROZEN = "frozen"
"""Their key in a table of bytes by column."""


def parameters_by_name(chunks: Sequence[Sequence[nn.Module]], *, trained: bool) -> dict[str, Parameter]:
    """The trained (or the frozen) parameters of the units of these chunks. One that two chunks share comes once."""
    by_name: dict[str, Parameter] = {}
    for parameter in (p for units in chunks for unit in units for p in unit.parameters() if p.requires_grad == trained):
        spec = spec_of(parameter)
        first = by_name.setdefault(spec.name, cast(Parameter, parameter))
        assert first is parameter, f"two parameters are called {spec.name}"
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

    layouts    of the buckets: `parameters` has those that are stored as they are, and then those of codes
    group_of   the process groups of the ranks that hold a parameter, by its group
    sharding   of the parameter column: sharded with ZeRO-3
    tiers      the memories in which they rest
    resting    where each bucket of the rank rests, in which these buckets come last
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        layouts: FrozenLayouts,
        group_of: Callable[[StateGroup], StateGroups],
        sharding: Sharding,
        dtype: torch.dtype,
        tiers: Tiers,
        resting: Sequence[Resting],
    ) -> None:
        self.by_name = parameters_by_name(chunks, trained=False)
        plain, coded = layouts
        first = len(resting) - len(plain) - len(coded)
        then = first + len(plain)
        buckets = buckets_of(plain, self.by_name, group_of)
        self.column = parameter_column(sharding, dtype, buckets, tiers, FROZEN, resting[first:then], first)
        self.parameters = [WholeParameters.adopt(self.column, *each) for each in enumerate(buckets)]
        buckets = buckets_of([layout.numbers for layout in coded], self.by_name, group_of)
        self.codes = coded_column(coded, buckets, sharding, tiers, resting[then:], then)
        self.parameters += [
            CodedParameters.made(self.codes, index, bucket, layout, dtype)
            for index, (bucket, layout) in enumerate(zip(buckets, coded, strict=True))
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that this rank stores on its device."""
        return self.nbytes_in(Tier.DEVICE)

    def nbytes_in(self, tier: Tier) -> int:
        """Bytes that this rank stores in a tier that is memory."""
        return self.column.nbytes_in(tier) + self.codes.nbytes_in(tier)

    def fill(self, read: Callable[[ParameterSpec], Tensor]) -> None:
        """Set all values, one bucket after the other, from the global tensors that `read` returns.

        Communicates nothing.
        """
        for at in self.parameters:
            at.fill(read)
