"""The input of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PastKeyValues:
    """The key-value cache of text generation, with room for L positions in each slot.

    layers     by block number: keys and values, [slots, g/t, L, d] each
    slots      int64 [b], ascending: the slot of each row of the batch
    positions  int64 [s, b]: position of each token of the batch; None: all rows begin at position 0
    reach      all positions of the batch are less than this
    lengths    int64 [b], if all rows begin at position 0: each row's tokens, which padding follows; None: all of them
    """

    layers: Mapping[int, tuple[Tensor, Tensor]]
    slots: Tensor
    positions: Tensor | None
    reach: int
    lengths: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one micro-batch. b micro-batch size, s sequence length. All tensors are on the run's device.

    tokens       int64 [b, s], inputs
    labels       int64 [b, s], the token that follows each input
    loss_mask    bool [b, s]: which predictions count in the loss; None: all
    samples      int64 [b]: number of each sample in the run's order, which keys its dropout
    documents    int64 [b, s]: number of each token's document within its sample; None: one document
    positions    int64 [b, s]: position of each token in the learned position table; None: its position in the sample
    loss_factor  0-dim: the gradient with which the backward of the summed loss starts; None where it is not known yet
    past         the key-value cache, in text generation only; else None
    row_lengths  in text generation, how many tokens each row has by now, padding left out: rotary frequencies that
                 depend on a length follow the row's own; None: all rows are as long as the pass
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None
    samples: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None
    loss_factor: Tensor | None = None
    past: PastKeyValues | None = None
    row_lengths: Sequence[int] | None = None
