"""How gradients travel between the ranks that share them: in their own dtype, or in blocks of int8 or int4 (ZeRO++)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.quantized import all_gather_quantized, all_reduce_quantized, reduce_scatter_quantized
from megazero.zero.storage import Bucket

KEPT = "error feedback"
"""Name of what is kept, beside the columns' names."""
BITS = {"none": None, "int8": 8, "int4": 4}
"""Value of --zero-quantized-gradients -> bits of an element on the way to its sum."""


class GradientMessages:
    """The collectives of each bucket's gradient.

    bits  of an element on the way to its sum, 8 or 4; None: gradients travel as they are
    keep  whether what quantisation loses is kept, in fp32, and added before the next one (error feedback). It is no
          part of a checkpoint: a resumed run begins with nothing kept
    """

    def __init__(self, buckets: Sequence[Bucket], bits: int | None, device: torch.device, *, keep: bool) -> None:
        self.buckets, self.bits = buckets, bits
        self._factor: Tensor | None = None
        """What the gradients of the last step were multiplied by; infinity if that step was skipped."""
        self._kept: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(buckets)
        """By bucket: of the neighbours' reduction, and of the sum across. None in a group of one."""
        if bits is not None and keep:
            for index, bucket in enumerate(buckets):
                inner, across = bucket.groups.inner, bucket.groups.across
                whole, shard = bucket.layout.numel, bucket.layout.numel // inner.size
                self._kept[index] = (
                    torch.zeros(whole, device=device) if inner.handle is not None else None,
                    torch.zeros(shard, device=device) if across.handle is not None else None,
                )

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(lost.nbytes for lost in self._all())

    def reduce_scatter(self, index: int, output: Tensor, whole: Tensor) -> CommunicationHandle:
        """Sum a bucket's gradient over the neighbours; this rank's shard goes to `output`, which may lie in `whole`."""
        group = self.buckets[index].groups.inner
        if self.bits is None:
            return collectives.reduce_scatter(output, whole, group)
        return reduce_scatter_quantized(output, whole, group, self.bits, self._kept[index][0])

    def all_reduce_across(self, index: int, shard: Tensor) -> CommunicationHandle:
        """Sum a bucket's shard, in place, over the ranks that store the same one."""
        group = self.buckets[index].groups.across
        if self.bits is None:
            return collectives.all_reduce(shard, group)
        return all_reduce_quantized(shard, group, self.bits, self._kept[index][1])

    def all_gather(self, index: int, whole: Tensor, shard: Tensor) -> CommunicationHandle:
        """Gather the summed shards of a bucket's gradient from the neighbours (ZeRO-0)."""
        group = self.buckets[index].groups.inner
        if self.bits is None:
            return collectives.all_gather(whole, shard, group)
        return all_gather_quantized(whole, shard, group)

    @torch.no_grad()
    def begin_step(self, factor: Tensor) -> None:
        """Multiply what is kept, so that it fits the gradients of the coming step.

        factor: 0-dim, by which this step's gradients are multiplied: the loss scale over the tokens of the batch. Both
        may change.
        """
        if self._factor is not None:
            for lost in self._all():
                lost.mul_(factor / self._factor)
        self._factor = factor

    def end_step(self, skip: Tensor) -> None:
        """Have the next step forget what is kept if this one is skipped: it was lost of gradients that are thrown away.

        skip: as in `optimizer.UpdateValues`.
        """
        if self._factor is not None:
            self._factor = torch.where(skip, torch.inf, self._factor)

    def forget(self) -> None:
        """Forget what is kept."""
        for lost in self._all():
            lost.zero_()

    def _all(self) -> list[Tensor]:
        return [lost for pair in self._kept for lost in pair if lost is not None]
