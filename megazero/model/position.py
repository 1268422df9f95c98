"""Positions that attention uses: slopes of ALiBi and angles of rotary positions, as constants on their device.

Both are made on first use, since a stage may be built without memory (on "meta"). They are then kept, since a copy to
the device in every forward would stall it. (ALiBi: Press et al. 2021, arXiv:2108.12409; rotary: Su et al. 2021,
arXiv:2104.09864.)
"""

from __future__ import annotations

from collections.abc import Sequence

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
    those of the first training). In training it is the length of the forward pass, whatever lengths its documents have.
    In generation it is the length of each row, whatever rows are beside it. For a row that grows longer, "dynamic"
    leaves keys in the cache as they are, as transformers does; under "longrope" generation computes them again
    (`inference.generate`), as transformers does for Phi-3.

    Raises ValueError for a head_dim of which no pairs turn.
    """

    def __init__(self, head_dim: int, settings: RotarySettings, trained_length: int = 0) -> None:
        settings.turned(head_dim)
        self.settings = settings
        self.head_dim, self.trained_length = head_dim, trained_length
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, like: Tensor, past: PastKeyValues | None = None, row_lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin for `like` [s, b, ...] on its device, float64 for float64, else float32.

        [s, 1, 1, d'/2], d' being the elements of a head that turn; with positions in `past` (each row has its own) or
        with rows of different frequencies [s, b, 1, 1, d'/2].

        row_lengths  of each row, for scalings that depend on it; None: all rows are as long as the pass
        """
        positions = None if past is None else past.positions
        length = like.shape[0] if positions is None or past is None else past.reach
        rows = [length_that_counts(self.settings, row, self.trained_length) for row in row_lengths or (length,)]
        self._make_tables(set(rows), length, like)
        if len(set(rows)) == 1:
            cos, sin = self.tables[rows[0]]
            return (cos[:length], sin[:length]) if positions is None else (cos[positions], sin[positions])
        places = [slice(length) if positions is None else positions[:, row] for row in range(len(rows))]
        cos, sin = (
            torch.stack([self.tables[counts][part][place] for counts, place in zip(rows, places, strict=True)], dim=1)
            for part in (0, 1)
        )
        return cos, sin

    def _make_tables(self, lengths: set[int], positions: int, like: Tensor) -> None:
        """Keep tables of at least so many positions, with the frequencies of these lengths that count."""
        needed = {counts: self._table(counts, positions, like) for counts in lengths}
        # Of longer sequences those of the last pass only: "dynamic" has other tables for each length.
        kept = {counts: tables for counts, tables in self.tables.items() if not counts or not any(lengths)}
        self.tables = kept | needed

    def _table(self, counts: int, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The table that is kept, or a new one where that does not do."""
        kept, dtype = self.tables.get(counts), torch.promote_types(like.dtype, torch.float32)
        if kept and kept[0].shape[0] >= positions and kept[0].device == like.device and kept[0].dtype == dtype:
            return kept
        lengths = {"length": counts, "trained_length": self.trained_length}
        steps = torch.arange(positions, device=like.device)
        cos, sin = rotary_tables(steps, self.head_dim, self.settings, like.dtype, **lengths)
        return cos[:, None, None], sin[:, None, None]
