"""The range of the token ids in a pair of files, found by reading them and kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.cache import cached_arrays
from megazero.data.indexed import BLOCK, DataError, IndexedDataset
from megazero.data.progress import Progress, Report

MOST_SCANNED = 1 << 33


@dataclass(frozen=True)
class IdRange:
    """Smallest and largest id of a pair, or of evenly spaced blocks of a very large one."""

    smallest: int
    largest: int


def file_identity(data: IndexedDataset) -> dict[str, Any]:
    """The identity of a pair: its path, the sizes and the modification times of its files."""
    stats = [path.stat() for path in (data.bin_path, data.idx_path)]
    return {
        "prefix": str(Path(data.prefix).resolve()),
        "bytes": [stat.st_size for stat in stats],
        "changed": [stat.st_mtime_ns for stat in stats],
    }


def id_range_of(data: IndexedDataset, root: Path, report: Report) -> IdRange:
    """The range of the ids. The first call also checks the whole .idx. Raises DataError for an inconsistent file."""

    def build(say: Report) -> dict[str, NDArray]:
        data.check()
        return {"facts": _scan(data, say)}

    smallest, largest, _ = cached_arrays(root, "checked", file_identity(data), build, report)["facts"][:].tolist()
    return IdRange(smallest, largest)


def _scan(data: IndexedDataset, report: Report) -> NDArray[np.int64]:
    """int64 [3]: smallest id, largest id, number of ids read.

    Files above 8 GiB are sampled, since 1 TB would take minutes before the first step. Datasets check each sample again
    when it is read.
    """
    count, itemsize = data.count, data.dtype.itemsize
    blocks = -(-count // BLOCK)
    stride = -(-count * itemsize // MOST_SCANNED) if count else 1
    progress = Progress(report, f"checking token ids of {data.bin_path}", count * itemsize / stride / 1e6, "MB")
    smallest, largest, scanned = 0, -1, 0
    for number in range(0, blocks, stride):
        part = data.read(number * BLOCK, min(BLOCK, count - number * BLOCK))
        smallest, largest, scanned = min(smallest, int(part.min())), max(largest, int(part.max())), scanned + len(part)
        progress.reach(scanned * itemsize / 1e6)
    return np.array([smallest, largest, scanned], dtype=np.int64)


def require_ids_below(vocab_size: int, data: IndexedDataset, facts: IdRange) -> None:
    """Raise DataError if an id is negative or not less than the vocabulary size."""
    if facts.smallest < 0 or facts.largest >= vocab_size:
        wrong = facts.smallest if facts.smallest < 0 else facts.largest
        raise DataError(
            f"{data.bin_path} holds token id {wrong}, outside the vocabulary of {vocab_size} (0 to {vocab_size - 1});"
            " give the tokenizer it was made with, or a larger --vocab-size"
        )
