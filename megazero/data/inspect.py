"""Shows data as training would read them: lengths and first samples of each split, as arrays and as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megazero.data.build import SPLITS, Datasets, Requests
from megazero.data.dataset import PackedSample, Samples
from megazero.data.indexed import DataError, IndexedDataset
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizer_record import read_tokenizer_record
from megazero.system.unfinished import ended_in_order, replaced_when_whole
from megazero.system.words import counted


def parse_samples(text: str | None) -> Requests:
    """'4000,200,20' as three numbers; for None, three times None. Raises DataError."""
    if text is None:
        return (None, None, None)
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0:
        raise DataError(f"--samples {text!r}: give three numbers that are not negative, TRAIN,VALID,TEST")
    return (numbers[0], numbers[1], numbers[2])


def first_samples(samples: Samples, count: int) -> NDArray[np.int64]:
    """The first samples of a dataset that is not empty: int64 [min(count, length), S+1]."""
    found = [samples[number] for number in range(min(count, len(samples)))]
    return np.stack([sample.tokens if isinstance(sample, PackedSample) else sample for sample in found])


def check_dump(path: Path, first: int) -> None:
    """What is wrong with a dump is known before any data are read. Raises DataError."""
    if first < 1:
        raise DataError(f"--first {first}: must be at least 1")
    if path.exists() or path.is_symlink():
        raise DataError(f"--dump {path}: is there already; nothing is overwritten")
    if not path.parent.is_dir():
        raise DataError(f"--dump {path}: there is no folder {path.parent}")


def dump(datasets: Datasets, path: Path, first: int) -> None:
    """Write an .npz with the first samples of each split that is not empty, and `lengths` of all three, atomically.

    Raises DataError where it cannot be written.
    """
    splits = {name: getattr(datasets, name) for name in SPLITS}
    arrays = {name: first_samples(samples, first) for name, samples in splits.items() if len(samples)}
    arrays["lengths"] = np.array([len(samples) for samples in splits.values()], dtype=np.int64)
    try:
        with ended_in_order(), replaced_when_whole(path) as out:
            np.savez(out, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise DataError(f"--dump {path}: {error.strerror}") from error


def summary(prefix: str) -> str:
    """A description of a pair: its documents, tokens, lengths of documents, tokenizer. Reads the whole .idx.

    Raises DataError.
    """
    data = IndexedDataset(prefix)
    data.check()
    before = np.concatenate([[0], np.cumsum(data.lengths[:], dtype=np.int64)])
    lengths = np.diff(before[data.document_indices[:]])
    made = read_tokenizer_record(prefix)
    lines = [
        f"{prefix}: {counted(len(lengths), 'document')} in {counted(len(data), 'sequence')}, "
        f"{counted(data.count, 'token')} ({data.dtype}, "
        f"{counted(data.count * data.dtype.itemsize, 'byte')})",
        f"  made with: {made or 'not said'}",
    ]
    if len(lengths):
        middle = np.median(lengths)
        few, many = np.percentile(lengths, [10, 90], method="inverted_cdf")  # of documents, not between two
        empty = int(np.count_nonzero(lengths == 0))
        lines.append(
            f"  tokens of a document: {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}, median "
            f"{middle:,.0f}; a tenth has at most "
            f"{few:,.0f}, a tenth at least {many:,.0f}"
            + f"; {empty:,} {'is' if empty == 1 else 'are'} empty"
            * bool(empty)
        )
    return "\n".join(lines)


def describe(datasets: Datasets, tokenizer: Tokenizer | None, show: int) -> str:
    """The length of each split and its first `show` samples, decoded if there is a tokenizer."""
    named = [(name, getattr(datasets, name)) for name in SPLITS] + list(datasets.named_valid.items())
    lines: list[str] = []
    for name, samples in named:
        lines.append(f"{name}: {counted(len(samples), 'sample')}")
        for number in range(min(show, len(samples))):
            ids = samples[number].tolist()
            shown = " ".join(map(str, ids[:12])) + (" ..." if len(ids) > 12 else "")
            lines.append(
                f"  sample {number}: ids {shown}"
                if tokenizer is None
                else f"  sample {number}: {tokenizer.decode(ids)!r}"
            )
    return "\n".join(lines)
