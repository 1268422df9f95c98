"""Datasets: numbered samples of S+1 tokens, from one pair of files or a blend of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megazero.data.blend import blend_index, planned_samples
from megazero.data.cache import Arrays, cached_arrays
from megazero.data.id_range import file_identity
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.orders import EpochPlan, build_orders, plan_epochs
from megazero.data.progress import Report, silent
from megazero.system import host_memory
from megazero.system.words import counted

LARGE = 1 << 22
ORDER_BYTES = 16, 12
"""Lower bounds of the bytes that `build_orders` needs for each document of each epoch, and for each sample."""
BLEND_BYTES = 10
"""A lower bound of the bytes that `blend_index` needs for each sample."""


@dataclass(frozen=True)
class PackedSample:
    """A sample into which several documents (conversations) are packed.

    tokens     int64 [S+1]: inputs are [:-1], labels [1:]
    loss_mask  bool [S]: whether the prediction of the label counts in the loss
    documents  int64 [S]: number of each input's document within the sample; the padding is a document of its own
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int64]


class Samples(Protocol):
    """A dataset of n samples in the order of the run.

    Item i is running text, int64 [S+1], whose inputs are [:-1] and labels [1:], or a packed sample. plans: for each
    pair of files, the epochs and the first sample of an epoch that is shuffled separately. They depend on the requested
    number of samples and determine the order: a longer run with other plans has other samples from the start. Packed
    samples have other numbers there (`PackedDataset.plans`).
    """

    @property
    def plans(self) -> tuple[tuple[int, int], ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64] | PackedSample: ...


class GPTDataset:
    """Samples of one split of one pair of files: int64 [S+1] each.

    Raises IndexError beyond its end, DataError for ids outside the vocabulary.
    """

    def __init__(
        self, data: IndexedDataset, orders: Arrays, how: EpochPlan, seq_length: int, vocab_size: int | None
    ) -> None:
        self.data, self.seq_length, self.vocab_size = data, seq_length, vocab_size
        self.plans = ((how.epochs, how.separate_from),)
        self.documents, self.rows, self.order = (
            orders[name] for name in ("document_index", "sample_index", "shuffle_index")
        )

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.data.prefix}: sample {index} of {len(self)}")
        sample = int(self.order[index])
        (first, offset), (last, stop) = self.rows[sample : sample + 2].tolist()
        sequences = self.documents[first : last + 1]
        starts = self.data.pointers[sequences] // self.data.dtype.itemsize
        lengths = self.data.lengths[sequences].astype(np.int64)
        lengths[-1] = stop + 1
        starts[0] += offset
        lengths[0] -= offset
        pieces = [
            self.data.read(start, length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        tokens = np.concatenate(pieces).astype(np.int64)
        if self.vocab_size is not None:
            self._check(tokens, index)
        return tokens

    def _check(self, tokens: NDArray[np.int64], index: int) -> None:
        assert self.vocab_size is not None
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            wrong = tokens[(tokens >= self.vocab_size) | (tokens < 0)][0]
            raise DataError(
                f"{self.data.bin_path}: sample {index} holds token id {wrong}, outside the vocabulary of "
                f"{self.vocab_size}"
            )


class BlendedDataset:
    """Samples of several datasets in the proportion of their weights.

    As in Megatron, its length can exceed the requested size by less than the number of datasets. Every requested sample
    exists. A surplus sample may be beyond the end of a small dataset; reading it raises IndexError.
    """

    def __init__(self, parts: Sequence[Samples], index: Arrays) -> None:
        self.parts, self.part, self.item = parts, index["dataset_index"], index["dataset_sample_index"]
        self.plans = tuple(plan for part in parts for plan in part.plans)

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"blend: sample {index} of {len(self)}")
        sample = self.parts[int(self.part[index])][int(self.item[index])]
        assert not isinstance(sample, PackedSample), "blends are of running text"
        return sample


class EmptyDataset:
    """A dataset without samples: a split that has no tokens, or of which no samples are requested."""

    plans: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        raise IndexError(f"sample {index} of an empty split")


def one_dataset(
    data: IndexedDataset,
    name: str,
    bounds: tuple[int, int],
    requested: int | None,
    seq_length: int,
    seed: int,
    vocab_size: int | None,
    root: Path,
    report: Report,
) -> Samples:
    """The split `name` (sequences bounds[0] .. bounds[1]-1) of a pair, with enough epochs for `requested` samples.

    Raises DataError for samples of an empty split, and where the memory does not suffice to shuffle it.
    """
    tokens = data.tokens_between(*bounds)
    if requested and not tokens:
        raise DataError(
            f"{counted(requested, f'{name} sample is', f'{name} samples are')} asked of {data.prefix}, but its "
            f"{name} split is empty (sequences "
            f"{bounds[0]} to {bounds[1]}"
            f" of {len(data)}, {counted(tokens, 'token')}); change --split, or ask for no {name} samples"
            + {"valid": " (in training: --eval-iters 0)", "test": " (in training: --test-iters 0)"}.get(name, "")
        )
    how: EpochPlan = plan_epochs(tokens, seq_length, requested)
    if how.samples == 0:
        return EmptyDataset()
    facts = {
        **file_identity(data),
        "sequences": list(bounds),
        "seq_length": seq_length,
        "seed": seed,
        "epochs": how.epochs,
        "separate_from": how.separate_from,
    }

    def build(say: Report) -> dict[str, NDArray]:
        documents = how.epochs * (bounds[1] - bounds[0])
        needed = data.lengths.dtype.itemsize * len(data) + ORDER_BYTES[0] * documents + ORDER_BYTES[1] * how.samples
        _require_memory(
            f"{name} order of {data.prefix}, {counted(how.epochs, 'epoch')} with {counted(how.samples, 'sample')},",
            needed,
        )
        say(
            f"{name} order of {data.prefix}: {counted(how.epochs, 'epoch')} of "
            f"{counted(bounds[1] - bounds[0], 'sequence')}, "
            f"{counted(how.samples, 'sample')}"
        )
        return build_orders(data.lengths[:], *bounds, seq_length, seed, how, say if how.samples >= LARGE else silent)

    return GPTDataset(data, cached_arrays(root, "order", facts, build, report), how, seq_length, vocab_size)


def _require_memory(what: str, needed: int) -> None:
    """Raise DataError if this machine has less free memory than `needed` bytes."""
    free = host_memory.available_bytes()
    if free is not None and needed > free:
        raise DataError(
            f"the {what} takes {needed / 2**30:,.1f} GiB to make, and this machine has {free / 2**30:,.1f} free: "
            f"ask for fewer --train-iters, --train-samples, --epochs, --eval-iters or --test-iters"
        )


def blend_of(name: str, shares: NDArray[np.float64], size: int, root: Path, report: Report) -> Arrays:
    """The index of a BlendedDataset of `size` samples of the split `name`, from the cache (`blend_index`).

    Its parts must be built for `built(shares, size)` samples each. Raises DataError where the memory does not suffice.
    """
    length = sum(planned_samples(shares, size))
    facts = {"shares": [share.hex() for share in shares.tolist()], "length": length}

    def build(say: Report) -> dict[str, NDArray]:
        _require_memory(
            f"{name} blend of {counted(len(shares), 'dataset')}, {counted(length, 'sample')},", BLEND_BYTES * length
        )
        say(f"blend of {counted(len(shares), 'dataset')}, {counted(length, 'sample')}")
        return blend_index(shares, length)

    return cached_arrays(root, "blend", facts, build, report)
