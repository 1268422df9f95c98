"""The model state of a model whose blocks are all alike, for pictures of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.tiers import Tier
from megazero.program.shape import BucketShape, PartShape, RankShape, UnitShape

PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 12
"""Of an element: a 16-bit parameter, its gradient, which is summed in fp32, and master weight and moments."""


@dataclass(frozen=True)
class ExampleModel:
    """A model, and how its state is sharded.

    blocks  number of blocks of each model chunk; the embedding and the head come on top
    numel   elements of a unit, the same for all; a multiple of the shards where the state is not on the device
    tier    where the optimizer state rests
    rests   where the parameters rest
    sums    where the gradients are summed
    """

    blocks: tuple[int, ...]
    zero_stage: int
    shards: int
    across: int = 1
    numel: int = 1
    tier: Tier = Tier.DEVICE
    rests: Tier = Tier.DEVICE
    sums: Tier = Tier.DEVICE

    def shape(self, model_chunks: Sequence[int]) -> RankShape:
        """The shape of a rank that holds these chunks: one bucket for each unit."""
        units: list[tuple[UnitShape, ...]] = []
        buckets: list[BucketShape] = []
        for chunk, number in enumerate(model_chunks):
            count = self.blocks[number] + (number == 0) + (number == len(self.blocks) - 1)
            units.append(tuple(UnitShape((n,), (n,), (n,)) for n in range(len(buckets), len(buckets) + count)))
            buckets += [self._bucket(chunk)] * count
        return RankShape(tuple(units), tuple(buckets))

    def _bucket(self, chunk: int) -> BucketShape:
        return BucketShape(
            chunk,
            PARAMETER_BYTES * self.numel,
            GRADIENT_BYTES * self.numel,
            gathered=(self._shares_parameters and self.shards > 1) or self.rests is not Tier.DEVICE,
            sharded_gradient=self.zero_stage >= (2 if self.sums is Tier.DEVICE else 1),
            sharded_state=self.zero_stage >= 1,
            shards=self.shards,
            across=self.across,
            parts=self._parts(),
            rests=self.rests,
            rests_whole=self.rests is not Tier.DEVICE and not self._shares_parameters,
            sums=self.sums,
        )

    @property
    def _shares_parameters(self) -> bool:
        return self.zero_stage == 3 or (self.zero_stage > 0 and self.rests is not Tier.DEVICE)

    def _parts(self) -> tuple[PartShape, ...]:
        """The one part of what a rank updates of a unit, where something of it needs one."""
        own = self.numel // (self.shards if self.zero_stage >= 1 else 1)
        sizes = (GRADIENT_BYTES * own, STATE_BYTES * own, PARAMETER_BYTES * own)
        moves = self.tier is not Tier.DEVICE or self.rests.in_files or self.sums is not Tier.DEVICE
        return (PartShape(self.tier, *sizes),) if moves else ()
