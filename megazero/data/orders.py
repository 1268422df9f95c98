"""Megatron's document, sample and shuffle indices (megatron/core/datasets/gpt_dataset.py) in vectorised numpy.

They are the same byte for byte. T tokens of a split, S sequence length, e epochs, n samples. Sample j has tokens j*S ..
(j+1)*S of the split's documents in the order of the document index: S + 1 tokens, the last of which is also the first
of the next sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from megazero.data.indexed import DataError
from megazero.data.progress import Report, silent
from megazero.system.words import counted

SEPARATE_BELOW = 0.80
BLOCK = 1 << 22


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is read. With the documents, the sequence length and the seed it determines the order."""

    epochs: int
    samples: int
    separate_from: int
    "First sample of the last epoch if that is shuffled separately; else equal to samples."

    @property
    def separate(self) -> bool:
        return self.separate_from < self.samples


def split_shares(split: str) -> list[float]:
    """'969,30,1' as three shares that sum to 1. Raises DataError."""
    words = split.split(",")
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", word) for word in words):
        raise DataError(f"--split {split!r}: give one to three numbers that are not negative, such as 969,30,1")
    shares = np.array([*map(float, words), 0.0, 0.0][:3], dtype=np.float64)
    if not shares.sum() > 0:
        raise DataError(f"--split {split!r}: at least one share must be larger than 0")
    return (shares / np.sum(shares)).tolist()


def split_bounds(split: str, sequences: int) -> list[tuple[int, int]]:
    """(first, last + 1) sequence of train, validation and test."""
    marks = [round(share * float(sequences)) for share in accumulate([0.0, *split_shares(split)])]
    return list(pairwise(marks))


def plan_epochs(tokens: int, seq_length: int, requested: int | None) -> EpochPlan:
    """The plan for at least `requested` samples of a split of `tokens` tokens; one epoch for None or 0."""
    if tokens == 0:
        assert not requested, "the caller refuses samples of an empty split"
        return EpochPlan(epochs=1, samples=0, separate_from=0)
    epochs = max(1, -(-((requested or 0) * seq_length + 1) // tokens))
    samples = (epochs * tokens - 1) // seq_length
    if epochs == 1 or requested is None:
        return EpochPlan(epochs, samples, samples)
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = requested - before_last < int(SEPARATE_BELOW * ((tokens - 1) // seq_length))
    return EpochPlan(epochs, samples, before_last if separate else samples)


def document_index(first: int, last: int, epochs: int, separate: bool, random: RandomState) -> NDArray[np.int32]:
    """Sequences first .. last-1, `epochs` times, shuffled together: int32 [epochs * documents].

    separate: shuffle the last epoch separately.
    """
    documents = np.arange(first, last, dtype=np.int32)
    if not separate:
        order = np.tile(documents, epochs)
        random.shuffle(order)
        return order
    order = np.tile(documents, epochs)
    random.shuffle(order[: -len(documents)])
    random.shuffle(order[-len(documents) :])
    return order


def sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], seq_length: int, samples: int
) -> NDArray[Any]:
    """Row j: (position in the document index, offset in that document) of token j*S.

    [samples + 1, 2], int32, or int64 if int32 does not suffice. Empty documents have no token, so only row 0 can point
    to one.
    """
    wide = len(documents) > np.iinfo(np.int32).max
    index = np.zeros((samples + 1, 2), dtype=np.int64 if wide else np.int32)
    own = lengths[documents]
    ends = np.cumsum(own, dtype=np.int64)
    for start in range(1, samples + 1, BLOCK):
        tokens = np.arange(start, min(start + BLOCK, samples + 1), dtype=np.int64) * seq_length
        position = np.searchsorted(ends, tokens, side="right")
        rows = index[start : start + len(tokens)]
        rows[:, 0] = position
        rows[:, 1] = tokens - (ends[position] - own[position])
    return index


def shuffle_index(separate_from: int, samples: int, random: RandomState) -> NDArray[Any]:
    """Sample numbers in the order of the run: 0 .. separate_from-1 shuffled, then the rest shuffled. [samples]

    uint32, or int64 from 2^32 - 2 samples on.
    """
    order = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(order[:separate_from])
    if separate_from < samples:
        random.shuffle(order[separate_from:])
    return order


def build_orders(
    lengths: NDArray[np.int32],
    first: int,
    last: int,
    seq_length: int,
    seed: int,
    how: EpochPlan,
    report: Report = silent,
) -> dict[str, NDArray]:
    """The three indices of one split. One RandomState(seed) shuffles the documents first, then the samples."""
    random = RandomState(seed)
    report(f"shuffling {how.epochs} x {counted(last - first, 'document')}")
    documents = document_index(first, last, how.epochs, how.separate, random)
    report(f"finding the first token of {counted(how.samples, 'sample')}")
    samples = sample_index(lengths, documents, seq_length, how.samples)
    report(f"shuffling {counted(how.samples, 'sample')}")
    return {
        "document_index": documents,
        "sample_index": samples,
        "shuffle_index": shuffle_index(how.separate_from, how.samples, random),
    }
