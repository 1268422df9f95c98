"""The initial weights of a model state, part by part: a bucket that does not rest in memory is never whole there."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.mpu.random import initialise_range
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from megazero.zero.storage import Bucket

ELEMENTS = 1 << 24
"""Of a bucket that are drawn at once where other ranks update them and this one only keeps the parameters."""


@torch.no_grad()
def initialise_state(state: ModelState, seed: int) -> None:
    """Set the initial weights, which are the same on every layout: the master weight, and the parameter rounded once.
    Moments in parts become zero.

    Frozen parameters are not set. Communicates nothing. Memory: a part of a bucket. Raises DiskError.
    """
    state.wait_parameters()
    parameters = state.columns[Column.PARAMETER]
    for index, bucket in enumerate(state.buckets):
        (start, stop), (first, last) = parameters.range_of(index), state.weights.range_of(index)
        parts = state.host.state_parts[index]
        for number, part in enumerate(parts):
            with state.host.looking((index, number), reads=False, writes=True) as held:
                for values in held.values():
                    values.zero_()
                _draw(held[Column.MASTER], bucket, part.start, seed)
                parameters.keep(index, held[Column.MASTER], part.start)
        if not parts:
            weights = state.weights.held(index)
            _draw(weights, bucket, first, seed)
            if state.has_master:
                parameters.keep(index, weights, first)
        for others in ((start, first), (last, stop)):
            for at in range(*others, ELEMENTS):
                values = torch.empty(
                    min(ELEMENTS, others[1] - at), dtype=state.weights.dtype, device=state.weights.device
                )
                _draw(values, bucket, at, seed)
                parameters.keep(index, values, at)


def _draw(out: Tensor, bucket: Bucket, start: int, seed: int) -> None:
    """Fill `out` [n] with the initial values of a bucket's elements from `start` on; those of no parameter are zero."""
    stop = start + out.numel()
    out.zero_()
    for one in bucket.layout.fragments(start, stop):
        own = out[one.offset - start :][: one.numel]
        initialise_range(own, one.spec, one.start, seed)
