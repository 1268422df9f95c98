"""Packing of several conversations into one sample.

It is first-fit packing: in an order shuffled by the seed, each conversation goes into the first sample that has room.
None is split. (Sorting by length first would fill samples a little better, but a sample would have conversations of
similar lengths only.)
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
    """The items of each bin: each item goes into the first bin that has room. No length may exceed the capacity.

    Bins are the leaves of a tree. A node has the largest room below it, so an item is placed in log n steps.
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
    """The conversations of each sample.

    members  int64: numbers of conversations, sample after sample
    bounds   int64 [samples + 1]: the beginning of each sample in `members`, and the end
    """

    members: ArrayRows
    bounds: NDArray[np.int64]


def pack(lengths: NDArray[np.int64], capacity: int, seed: int) -> Packs:
    """Pack conversations of these lengths into samples of `capacity` tokens.

    Those of length 0 are left out; longer ones count as `capacity`.
    """
    kept = np.flatnonzero(lengths > 0)
    order = kept[np.random.RandomState(seed).permutation(len(kept))]
    bins = first_fit(np.minimum(lengths[order], capacity).tolist(), capacity)
    members = [order[items] for items in bins]
    bounds = np.cumsum([0, *(len(items) for items in bins)], dtype=np.int64)
    return Packs(np.concatenate(members) if members else np.zeros(0, dtype=np.int64), bounds)


class PackedDataset:
    """Samples of packed conversations, in another order in every epoch.

    tokens     int32 [T]: tokens of all conversations, back to back
    loss_mask  bool [T]: whether the loss on predicting a token counts
    starts     int64 [conversations + 1]: the beginning of each conversation, and the end
    padding    the token that pads samples; its predictions do not count
    requested  number of samples that the run takes; the dataset has as many epochs as these need

    Raises IndexError beyond its end.
    """

    plans: tuple[tuple[int, int], ...]
    """(samples of an epoch, checksum of `starts`). With the seed and the number of an epoch they determine its order.
    The number of epochs is not among them, so a longer run begins like a shorter one.
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
        """Sample `number` of an epoch in the order before shuffling."""
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
