"""Several conversations in one sample: which share one, and the samples that they make.

First-fit: the conversations, in an order shuffled by the seed, each go into the first sample that has room. None is
split. (Sorted by length before, they would fill samples a little better, and every sample would hold conversations of
one kind.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megazero.data.dataset import PackedSample
from megazero.data.file_array import ArrayRows


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Items by bin: each into the first bin that has room for it. No length is above the capacity.

    Bins are the leaves of a tree whose nodes know the most room below them, so that an item is placed in log n steps.
    """
    size = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * size)
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        assert length <= capacity
        node = 1
        while node < size:
            node *= 2
            node += room[node] < length
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


@dataclass(frozen=True)
class Packs:
    """members: numbers of conversations, sample after sample. bounds: where each sample begins in them, and the end,
    int64 [samples + 1].
    """

    members: ArrayRows
    bounds: NDArray[np.int64]


def pack(lengths: NDArray[np.int64], capacity: int, seed: int) -> Packs:
    """Conversations of these lengths in samples of `capacity` tokens.

    Those of length 0 are left out, longer ones count as `capacity`.
    """
    kept = np.flatnonzero(lengths > 0)
    order = kept[np.random.RandomState(seed).permutation(len(kept))]
    bins = first_fit(np.minimum(lengths[order], capacity).tolist(), capacity)
    members = [order[items] for items in bins]
    bounds = np.cumsum([0, *(len(items) for items in bins)], dtype=np.int64)
    return Packs(np.concatenate(members) if members else np.zeros(0, dtype=np.int64), bounds)


class PackedDataset:
    """Samples of packed conversations, every epoch in an order of its own.

    tokens, loss_mask  of all conversations one after the other: int32 [T], bool [T]
    starts             where each begins, and the end: int64 [conversations + 1]
    padding            the token that fills a sample up; no prediction of it counts
    requested          samples that the run takes; there are as many epochs as that needs

    Raises IndexError past its end.
    """

    plans: tuple[tuple[int, int], ...]
    """Samples of an epoch, and a checksum of where its conversations begin: with these, the seed and its number an
    epoch's order is given. The number of epochs takes no part: a longer run begins like a shorter one.
    """

    def __init__(
        self,
        tokens: ArrayRows,
        loss_mask: ArrayRows,
        starts: NDArray[np.int64],
        packs: Packs,
        *,
        seq_length: int,
        padding: int,
        seed: int,
        requested: int | None,
    ) -> None:
        self.tokens, self.loss_mask, self.starts, self.packs = tokens, loss_mask, starts, packs
        self.seq_length, self.padding, self.seed = seq_length, padding, seed
        self.epoch_samples = len(packs.bounds) - 1
        self.epochs = max(1, -(-(requested or 0) // self.epoch_samples)) if self.epoch_samples else 0
        self.plans = ((self.epoch_samples, crc32(starts.tobytes())),)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return self.epochs * self.epoch_samples

    def __getitem__(self, index: int) -> PackedSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, self.epoch_samples)
        return self.sample(int(self._order(epoch)[place]))

    def sample(self, number: int) -> PackedSample:
        """Sample `number` of an epoch before it is shuffled."""
        first, last = self.packs.bounds[number : number + 2].tolist()
        tokens = np.full(self.seq_length + 1, self.padding, dtype=np.int64)
        loss_mask = np.zeros(self.seq_length + 1, dtype=np.bool_)
        documents = np.full(self.seq_length + 1, last - first, dtype=np.int64)
        place = 0
        for document, member in enumerate(self.packs.members[first:last].tolist()):
            start, stop = self.starts[member : member + 2].tolist()
            length = min(stop - start, self.seq_length + 1)
            tokens[place : place + length] = self.tokens[start : start + length]
            loss_mask[place : place + length] = self.loss_mask[start : start + length]
            documents[place : place + length] = document
            place += length
        return PackedSample(tokens, loss_mask[1:], documents[:-1])

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.RandomState([self.seed, epoch]).permutation(self.epoch_samples)
