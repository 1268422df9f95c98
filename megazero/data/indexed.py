"""Megatron's indexed dataset: token ids back to back in PREFIX.bin, and the position of each sequence in PREFIX.idx.

.idx, little-endian: magic (9 bytes), u64 version 1, u8 dtype code, u64 N sequences, u64 D = documents + 1, then int32
lengths[N], int64 byte pointers[N], int64 document_indices[D] (first 0, last N), optionally int8 modes[N].

Opening a pair checks sizes and ends. It reads a few pages whatever the size, so every rank may do it. `check` reads the
whole .idx; the rank that builds the index caches calls it once. Both files are read by offset, so that a file that is
truncated during a run gives an error with its name.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.file_array import DataError, FileArray, OpenFile
from megazero.data.hints import advice_for

__all__ = ["BLOCK", "CODES", "DTYPES", "HEADER", "MAGIC", "DataError", "IndexedDataset", "dtype_for", "pair_paths"]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 1 << 22


def pair_paths(prefix: str | Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx. The prefix may contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron writes for a vocabulary size: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """A pair of files, open for reading.

    dtype              of the ids
    count              number of ids in .bin
    lengths            int32 [N], ids of each sequence
    pointers           int64 [N], byte where each sequence starts in .bin
    document_indices   int64 [documents + 1], first sequence of each document
    modes              int8 [N] or None

    Raises DataError, which names the file and the numbers that disagree.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = pair_paths(prefix)
        self._require_files()
        idx = OpenFile(self.idx_path)
        self.dtype, sequences, bounds = self._header(idx)
        sizes = (4 * sequences, 8 * sequences, 8 * bounds)
        bare = HEADER.size + sum(sizes)
        if idx.size not in (bare, bare + sequences):
            raise DataError(
                f"{self.idx_path} has {idx.size} bytes, but its header ({sequences} sequences, {bounds - 1} "
                f"documents) needs {bare} ({bare + sequences} with modes): truncated or corrupt"
            )
        starts = [HEADER.size + sum(sizes[:number]) for number in range(3)]
        self.lengths = FileArray(idx, starts[0], np.dtype("<i4"), (sequences,))
        self.pointers = FileArray(idx, starts[1], np.dtype("<i8"), (sequences,))
        self.document_indices = FileArray(idx, starts[2], np.dtype("<i8"), (bounds,))
        self.modes = FileArray(idx, bare, np.dtype("i1"), (sequences,)) if idx.size > bare else None
        self._bin = OpenFile(self.bin_path)
        self.count = self._check_ends() // self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        """Ids of one sequence, in the dtype of the file. Raises IndexError beyond the end."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix}: sequence {sequence} of {len(self)}")
        return self.read(int(self.pointers[sequence]) // self.dtype.itemsize, int(self.lengths[sequence]))

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Ids start .. start+count-1, in the dtype of the file. Raises DataError if the file has been truncated."""
        itemsize = self.dtype.itemsize
        return np.frombuffer(self._bin.read(start * itemsize, count * itemsize), dtype=self.dtype)

    def tokens_between(self, first: int, last: int) -> int:
        """Number of ids in sequences first .. last-1, in constant time: sequences are back to back (see `check`)."""
        if last <= first:
            return 0
        begin, end = int(self.pointers[first]), int(self.pointers[last - 1])
        return (end - begin) // self.dtype.itemsize + int(self.lengths[last - 1])

    def _require_files(self) -> None:
        missing = [str(path) for path in (self.bin_path, self.idx_path) if not path.is_file()]
        if missing:
            raise DataError(
                advice_for(self.prefix)
                or f"no file {' and no file '.join(missing)} (a pair without its .idx was never finished)"
            )

    def _header(self, idx: OpenFile) -> tuple[np.dtype[Any], int, int]:
        if idx.size < HEADER.size:
            raise DataError(f"{self.idx_path} has {idx.size} bytes, fewer than the header's {HEADER.size}: truncated")
        magic, version, code, sequences, bounds = HEADER.unpack(idx.read(0, HEADER.size))
        if magic != MAGIC:
            raise DataError(f"{self.idx_path} starts with {magic!r}, not with {MAGIC!r}: not an index of this format")
        if version != 1:
            raise DataError(f"{self.idx_path} has version {version}; only version 1 is known")
        if code not in DTYPES:
            raise DataError(f"{self.idx_path} has dtype code {code}; known are 1 to {len(DTYPES)}")
        if bounds < 1:
            raise DataError(f"{self.idx_path} has {bounds} document bounds; the least is 1")
        return DTYPES[code], sequences, bounds

    def _check_ends(self) -> int:
        """Check both ends of the index against the size of .bin; return that size in bytes."""
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if (first, last) != (0, len(self)):
            raise DataError(
                f"{self.idx_path}: document bounds run from {first} to {last}, not from 0 to {len(self)} sequences"
            )
        expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0
        found = self._bin.size
        if expected != found:
            raise DataError(
                f"{self.bin_path} has {found} bytes, but {self.idx_path} describes {expected}: truncated, or not its "
                "pair"
            )
        if found % self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path} has {found} bytes, as {self.idx_path} says: no whole number of {self.dtype} ids "
                f"of {self.dtype.itemsize} "
                "bytes, so one of them is damaged"
            )
        return found

    def check(self) -> None:
        """Read the whole .idx. Raises DataError unless lengths are not negative, sequences are back to back, and
        document bounds are in order.
        """
        itemsize = self.dtype.itemsize
        expected = 0
        for start in range(0, len(self), BLOCK):
            lengths = self.lengths[start : start + BLOCK].astype(np.int64)
            if lengths.min() < 0:
                at = int(np.argmax(lengths < 0))
                raise DataError(f"{self.idx_path}: sequence {start + at} has length {lengths[at]}")
            ends = expected + np.cumsum(lengths) * itemsize
            wrong = self.pointers[start : start + BLOCK] != ends - lengths * itemsize
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{self.idx_path}: sequence {start + at} starts at byte {self.pointers[start + at]}, "
                    f"but the lengths before it end at byte {ends[at] - lengths[at] * itemsize}"
                )
            expected = int(ends[-1])
        for start in range(0, len(self.document_indices) - 1, BLOCK):
            bounds = self.document_indices[start : start + BLOCK + 1]
            if (bounds[1:] < bounds[:-1]).any():
                at = start + int(np.argmax(bounds[1:] < bounds[:-1]))
                raise DataError(
                    f"{self.idx_path}: document {at} ends at sequence {self.document_indices[at + 1]} before it starts"
                )
