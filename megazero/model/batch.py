"""What one forward pass works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Past:
    """Keys and values of the tokens before a batch's own, and where its own are to be kept. L positions that there is
    room for.

    layers     by block number: keys and values, [slots, g/t, L, d] each
    slots      int64 [b], ascending: the slot that each row continues
    positions  int64 [s, b]: where the batch's tokens stand; None: all rows begin, at position 0
    reach      no token of the batch stands at this position or beyond it
    """

    layers: Mapping[int, tuple[Tensor, Tensor]]
    slots: Tensor
    positions: Tensor | None
    reach: int


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one micro-batch. b micro-batch size, s sequence length. All tensors on the run's device.

    tokens       int64 [b, s], inputs
    labels       int64 [b, s], the token that follows each input
    loss_mask    bool [b, s] or None: which predictions count; None means all
    samples      int64 [b]: number of each sample in the run's order, which keys its dropout
    documents    int64 [b, s] or None: number of each token's document within its sample; None: one document
    positions    int64 [b, s] or None: where each token stands for a learned table of positions; None: where it stands
    in the sample
    loss_factor  0-dim or None: what the backward of the micro-batch's summed loss starts from, where that is known
    ahead
    past         None but where text is generated: the tokens continue what is kept there
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None
    samples: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    loss_factor: Tensor | None = None
    past: Past | None = None
