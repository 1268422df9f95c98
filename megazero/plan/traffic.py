"""Bytes that a rank sends over the data-parallel ranks in a step, by formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of a rank and step for each element of its buckets: a reduce-scatter's input, an all-gather's output and
    twice an all-reduce's tensor, as `mpu.grid.Group.traffic` counts them.

    inside  among the K neighbours that share out the state
    across  among the N / K ranks that store the same shard
    """

    inside: float
    across: float

    @property
    def total(self) -> float:
        return self.inside + self.across


def state_traffic(
    zero_stage: int,
    shard_size: int,
    sets: int,
    *,
    micro_batches: int,
    reductions: int,
    gradient_bytes: float,
    parameter_bytes: float,
    summed_bytes: float | None = None,
    shards_parameters: bool = False,
    sums_leave: bool = False,
) -> Traffic:
    """The traffic of the gradients and parameters of a rank (ZeRO: arXiv:1910.02054, section 7).

    Under ZeRO-3 this is the most: parameters are gathered for the forward and for the backward of each micro-batch. A
    list may keep some of them in between.

    shard_size       K, number of neighbours that share out the state
    sets             number of such sets, N / K
    micro_batches    of a step; in vertical order the number of groups, each of which gathers as one micro-batch does
    reductions       how often ZeRO-2 and 3 reduce a bucket in a step: as often as there are micro-batches, or once
                     where the schedule is breadth-first. What goes across is sent once per step at every stage
    gradient_bytes   bytes per element of a gradient that travels
    parameter_bytes  bytes per element of a parameter
    summed_bytes     bytes per element of a sum of gradients that is gathered; None: `gradient_bytes`
    sums_leave       whether gradients are summed off the device: then every stage reduces as often, and across too
    shards_parameters  whether parameters are sharded with ZeRO-1 or 2 too, because they do not rest on the device
    """
    summed = gradient_bytes if summed_bytes is None else summed_bytes
    gathered = summed if zero_stage == 0 else parameter_bytes
    if zero_stage == 3 or shards_parameters:
        gathered = 2 * micro_batches * parameter_bytes
    times = reductions if zero_stage >= 2 or sums_leave else 1
    gathered *= times if zero_stage == 0 else 1
    inside = 0.0 if shard_size == 1 else times * gradient_bytes + gathered
    return Traffic(
        inside, 0.0 if sets == 1 else (reductions if sums_leave else 1) * (gradient_bytes + summed) / shard_size
    )
