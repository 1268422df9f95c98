"""Positions that attention uses: slopes of ALiBi and angles of rotary positions, as constants on their device.

Both are made on first use, since a stage may be built without memory (on "meta"). They are then kept, since a copy to
the device in every forward would stall it. (ALiBi: Press et al. 2021, arXiv:2108.12409; rotary: Su et al. 2021,
arXiv:2104.09864.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.rotary import rotary_tables
from fused_ops.softmax import alibi_slopes
from megazero.model.batch import PastKeyValues


class AlibiSlopes:
    """The slopes of this tp rank's heads: a slice of the slopes of all heads."""

    def __init__(self, heads: int, rank: int, size: int) -> None:
        part = heads // size
        self.mine = alibi_slopes(heads)[rank * part : (rank + 1) * part]
        self.tensor: Tensor | None = None

    def __call__(self, like: Tensor) -> Tensor:
        """[n/t] on the device of `like`: float64 for float64, else float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.tensor is None or self.tensor.device != like.device or self.tensor.dtype != dtype:
            self.tensor = torch.tensor(self.mine, dtype=torch.float64).to(like.device, dtype)
        return self.tensor


class RotaryAngles:
    """cos and sin of every position, kept for the longest sequence so far. Raises ValueError for an odd head_dim."""

    def __init__(self, head_dim: int, base: float) -> None:
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head dimension, not {head_dim}")
        self.head_dim, self.base = head_dim, base
        self.tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, like: Tensor, past: PastKeyValues | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for `like` [s, b, ...] on its device, float64 for float64, else float32.

        [s, 1, 1, d/2]; with positions in `past` (each row has its own) [s, b, 1, 1, d/2].
        """
        positions = None if past is None else past.positions
        length, kept = like.shape[0] if positions is None or past is None else past.reach, self.tables
        dtype = torch.promote_types(like.dtype, torch.float32)
        if kept is None or kept[0].shape[0] < length or kept[0].device != like.device or kept[0].dtype != dtype:
            cos, sin = rotary_tables(torch.arange(length, device=like.device), self.head_dim, self.base, like.dtype)
            kept = self.tables = (cos[:, None, None], sin[:, None, None])
        if positions is not None:
            return kept[0][positions], kept[1][positions]
        return kept[0][:length], kept[1][:length]
