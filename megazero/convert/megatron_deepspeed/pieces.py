"""The parts of a global tensor that tp ranks hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megazero.config.inventory import TABLES
from megazero.convert.shards import cut_shards


def rank_pieces(name: str, whole: Tensor, tp: int, rows: int) -> list[list[Tensor]]:
    """Each tp rank's part of a global tensor, as pieces one after the other. Vocabulary padding is zeros."""
    if name not in TABLES:
        return [[piece] for piece in cut_shards(name, whole, tp)]
    size = rows // tp
    return [list(_table_rows(whole, t * size, (t + 1) * size)) for t in range(tp)]


def _table_rows(whole: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    rows = whole.shape[0]
    if start < rows:
        yield whole[start : min(stop, rows)]
    if stop > rows:
        yield whole.new_zeros(stop - max(start, rows), whole.shape[1])
