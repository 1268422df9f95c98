"""Positions that attention uses: slopes of ALiBi and angles of rotary positions, as constants on their device.

Both are made on first use, since a stage may be built without memory (on "meta"). They are then kept, since a copy to
the device in every forward would stall it. (ALiBi: Press et al. 2021, arXiv:2108.12409; rotary: Su et al. 2021,
arXiv:2104.09864.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.rotary import rotary_tables
from fused_ops.rotary_frequencies import length_that_counts
from fused_ops.softmax import alibi_slopes
from megazero.config.rotary import RotarySettings
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
    """cos and sin of every position, kept for the longest sequence so far.

    settings        of the rotary positions
    trained_length  the model's number of positions, for scalings that do not name the length of the first training

    Some scalings depend on the length of the sequence ("dynamic" on all of it, "longrope" on whether it is longer than
    those of the first training). It is the length of the forward pass: in training the run's sequence length, whatever
    lengths its documents have; in generation the reach of the batch. A key that was cached before the reach grew
    keeps the angles of its time, as in transformers.

    Raises ValueError for a head_dim of which no pairs turn.
    """

    def __init__(self, head_dim: int, settings: RotarySettings, trained_length: int = 0) -> None:
        settings.turned(head_dim)
        self.settings = settings
        self.head_dim, self.trained_length = head_dim, trained_length
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, like: Tensor, past: PastKeyValues | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for `like` [s, b, ...] on its device, float64 for float64, else float32.

        [s, 1, 1, d'/2], d' being the elements of a head that turn; with positions in `past` (each row has its own)
        [s, b, 1, 1, d'/2].
        """
        positions = None if past is None else past.positions
        length = like.shape[0] if positions is None or past is None else past.reach
        cos, sin = self._of_length(length, like)
        if positions is not None:
            return cos[positions], sin[positions]
        return cos[:length], sin[:length]

    def _of_length(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of at least `length` positions, with the frequencies of that length."""
        counts = length_that_counts(self.settings, length, self.trained_length)
        kept, dtype = self.tables.get(counts), torch.promote_types(like.dtype, torch.float32)
        if kept is None or kept[0].shape[0] < length or kept[0].device != like.device or kept[0].dtype != dtype:
            lengths = {"length": counts, "trained_length": self.trained_length}
            positions = torch.arange(length, device=like.device)
            cos, sin = rotary_tables(positions, self.head_dim, self.settings, like.dtype, **lengths)
            kept = cos[:, None, None], sin[:, None, None]
            # Of longer sequences the last length only: "dynamic" has other tables for each.
            self.tables = {key: tables for key, tables in self.tables.items() if not key or not counts} | {counts: kept}
        return kept
