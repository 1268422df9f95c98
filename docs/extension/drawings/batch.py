"""Which samples of a global batch go where: the loader's own answer, for two layouts of the same batch."""

from __future__ import annotations

import numpy as np

from docs.extension.svg import COLOURS, Picture, shade
from megazero.data.loader import TrainLoader

_BOX, _MARGIN, _ROW = 26, 130, 32


class _Numbered:
    """A dataset whose sample i is all i."""

    plans = ()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(3, index, dtype=np.int64)


def batch(global_batch: int = 16, consumed: int = 32) -> str:
    """dp 2 with micro-batches of two, and dp 4 with micro-batches of one."""
    layouts = ((2, 2), (4, 1))
    height = 24 + sum(_ROW * dp + 34 for dp, _ in layouts)
    picture = Picture(_MARGIN + global_batch * (_BOX + 4) + 40, height, "Samples of a global batch by rank")
    top = 0.0
    for dp, size in layouts:
        count = global_batch // (dp * size)
        said = f"dp {dp}, --micro-batch-size {size}: {count} micro-batches on each rank"
        picture.text(0, top + 18, said, at="start", bold=True)
        for rank in range(dp):
            _row(picture, dp, size, rank, (consumed, global_batch), top + 28 + rank * _ROW)
        top += _ROW * dp + 34
    picture.text(0, height - 6, "A colour: what is in the same place of its rank's step.", at="start", size=11)
    return picture.svg()


def _row(picture: Picture, dp: int, size: int, rank: int, wanted: tuple[int, int], y: float) -> None:
    loader = TrainLoader(_Numbered(), dp_rank=rank, dp_size=dp, micro_batch_size=size, seq_length=2, num_workers=0)
    picture.text(8, y + 18, f"rank {rank} of dp", at="start", size=11)
    x = float(_MARGIN)
    for number, made in enumerate(loader.micro_batches(*wanted)):
        samples = made.samples.tolist()
        for sample in samples:
            picture.box(x, y, _BOX, _BOX, shade(COLOURS[number % 7], 0.1))
            picture.text(x + _BOX / 2, y + 17.5, str(sample), size=11, fill="#fff")
            x += _BOX + 3
        x += 12
