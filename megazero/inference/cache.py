"""The key-value cache: keys and values of earlier tokens, so that a new token needs only its own computation.

b rows, s new tokens, g key-value heads, d head dim, t = tp size, L positions that a layer's cache has room for: as many
as the rows have, and no more than the layer's queries reach (fused_ops/attention/cached.py has their places).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.model.attention import Attention
from megazero.model.batch import PastKeyValues
from megazero.model.block import Block
from megazero.model.stage import Stage

STEP = 256
"""Positions by which the cache grows. It then copies its contents once in this many tokens, and takes no memory for
tokens that may never be generated.
"""


class KeyValueCache:
    """Keys and values, each [slots, g/t, L, d], of every block of these stages, in their dtype and on their device.

    slots   the number of sequences
    length  the number of positions that there is room for at first
    """

    def __init__(self, stages: Sequence[Stage], slots: int, length: int) -> None:
        layout = stages[0].layout
        self.slots, self.length = slots, _whole_steps(length)
        self._like = torch.empty(0, dtype=layout.dtype, device=layout.device)
        blocks = {
            number: block
            for stage in stages
            for number, block in zip(stage.spec.blocks, stage.blocks.values(), strict=True)
        }
        self.reaches = {number: _attention(block).reach for number, block in blocks.items()}
        self.layers = {number: self._room_of(number, block) for number, block in blocks.items()}

    def _places(self, number: int) -> int:
        """L of a block."""
        width = self.reaches[number].width
        return self.length if width is None else min(self.length, width)

    def _room_of(self, number: int, block: object) -> tuple[Tensor, Tensor]:
        attention = _attention(block)
        shape = self.slots, attention.groups, self._places(number), attention.size
        # Zeros, because the plain bodies multiply positions beyond a row's end by a probability of 0, which is NaN if
        # the memory holds NaN.
        return self._like.new_zeros(shape), self._like.new_zeros(shape)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def beginning(self, slots: Tensor, length: int, lengths: Tensor | None = None) -> PastKeyValues:
        """The argument `past` of a forward pass over rows of `length` tokens, which begin in `slots`, int64 [b].

        lengths  int64 [b], how many of these tokens a row has, where padding follows them; None: all
        """
        self._make_room(length)
        return PastKeyValues(self.layers, slots, None, length, lengths)

    def continuing(self, slots: Tensor, positions: Tensor, count: int, reach: int) -> PastKeyValues:
        """The argument `past` of a forward pass over rows of `count` tokens, which continue `slots`, int64 [b].

        positions  int64 [b], the position of each row's first new token
        reach      larger than every position of the new tokens
        """
        self._make_room(reach)
        steps = torch.arange(count, device=positions.device).unsqueeze(1)
        return PastKeyValues(self.layers, slots, positions + steps, reach)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the contents of slots `source` into slots `target`, int64 [k] each."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _make_room(self, length: int) -> None:
        if length <= self.length:
            return
        self.length = _whole_steps(length)
        for number, pair in self.layers.items():
            # While a layer has fewer places than its queries reach, position p lies at place p, as in the longer one.
            if (places := self._places(number)) > pair[0].shape[2]:
                self.layers[number] = (_extended(pair[0], places), _extended(pair[1], places))


def _attention(block: object) -> Attention:
    assert isinstance(block, Block)
    return block.attention


def _whole_steps(length: int) -> int:
    return -(-length // STEP) * STEP


def _extended(tensor: Tensor, length: int) -> Tensor:
    slots, groups, kept, size = tensor.shape
    longer = tensor.new_zeros(slots, groups, length, size)
    longer[:, :, :kept] = tensor
    return longer
