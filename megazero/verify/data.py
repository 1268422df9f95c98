"""The samples of a proof: each is unlike the others, and very unequal numbers of their tokens count in the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megazero.data.build import Datasets
from megazero.data.dataset import PackedSample, Samples

EOD = 0
"""The token that ends a document. With --eod-mask-loss its prediction does not count, so that micro-batches have
unequal numbers of tokens, and a mean of means is not the mean."""


@dataclass(frozen=True)
class ProofRows:
    """Samples by number: `length` + 1 token ids below `vocabulary`. Of every four samples one has no separator, one
    some, one many, and one nothing but separators behind its first token.
    """

    seed: int
    length: int
    vocabulary: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        chance = np.random.Generator(np.random.PCG64([self.seed, index]))
        row = chance.integers(1, self.vocabulary, self.length + 1)
        share = (0.0, 0.2, 0.7, 1.0)[int(chance.integers(0, 4))]
        ends = chance.random(self.length + 1) < share
        ends[0] = False
        row[ends] = EOD
        return row


class PackedRows:
    """Samples as conversations are: each has the mask of its labels and the numbers of its documents. A document ends
    with `EOD`, whose prediction does not count.
    """

    def __init__(self, rows: Samples) -> None:
        self.rows, self.plans = rows, rows.plans

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedSample:
        row = self.rows[index]
        assert isinstance(row, np.ndarray)
        ends = row[:-1] == EOD
        return PackedSample(row, ~ends, np.cumsum(ends) - ends)


def packed(sets: Datasets) -> Datasets:
    """The samples of a small run, packed."""
    return replace(sets, train=PackedRows(sets.train), valid=PackedRows(sets.valid))
