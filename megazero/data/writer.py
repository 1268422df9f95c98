"""Writes a .bin/.idx pair, all of it or nothing.

Both files are written under temporary names, synced, and renamed, .bin first and .idx last; a reader needs both. The
.idx of an old pair is removed first, so that a new .bin never has an old .idx.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.indexed import BLOCK, CODES, HEADER, MAGIC, DataError, IndexedDataset, pair_paths
from megazero.data.output_places import require_prefix
from megazero.data.tokenizer_record import TokenizerRecord, common, path_of
from megazero.system.durable import sync_folder
from megazero.system.unfinished import open_unfinished, unfinished_path

LONGEST = 2**31 - 1


class PairWriter:
    """A context manager that writes a pair. Leaving it without an exception publishes the pair, else removes it.

    tokenizer_record: the tokenizer of the ids, which is recorded in PREFIX.tokenizer. It needs 4 bytes of memory per
    sequence and 8 per document. Raises DataError for an existing pair without `overwrite`, for a prefix that names no
    files, and for a dtype that the format does not have.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[Any],
        *,
        tokenizer_record: TokenizerRecord | None = None,
        overwrite: bool = False,
    ) -> None:
        require_prefix("--output-prefix", prefix)
        self.bin_path, self.idx_path = pair_paths(prefix)
        self._made_with_path, self._made_with = path_of(prefix), tokenizer_record
        existing = [str(path) for path in (self.bin_path, self.idx_path) if path.exists()]
        if existing and not overwrite:
            raise DataError(
                f"{' and '.join(existing)} exist already; name another output, or replace them with --overwrite"
            )
        if dtype not in CODES:
            raise DataError(f"dtype {dtype} has no code in this format; codes exist for {', '.join(map(str, CODES))}")
        self.dtype = dtype
        self.tokens = 0
        self._unfinished = 0
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._modes = bytearray()
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin_temporary, self._idx_temporary = map(unfinished_path, (self.bin_path, self.idx_path))
        try:
            self._bin = open_unfinished(self.bin_path)  # closed in __exit__
        except FileExistsError as error:
            raise DataError(f"{error.filename} {error.strerror}") from error

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._bin.close()
            for path in (self._bin_temporary, self._idx_temporary):
                path.unlink(missing_ok=True)

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    @property
    def documents(self) -> int:
        return len(self._bounds) - 1

    def write(self, tokens: NDArray[Any], lengths: Iterable[int], *, unfinished: int = 0) -> None:
        """Append documents of one sequence each.

        tokens      ids back to back
        lengths     lengths of the documents that end in these ids
        unfinished  number of ids at the end that belong to a document whose length comes in a later call

        Raises DataError where these numbers do not agree.
        """
        added = np.asarray(list(lengths), dtype=np.int64)
        if self._unfinished + len(tokens) != added.sum() + unfinished:
            raise DataError(
                f"{self.bin_path}: {self._unfinished} + {len(tokens)} ids for lengths that sum to {added.sum()} + "
                f"{unfinished}"
            )
        self._unfinished = unfinished
        first = self.sequences
        self._append(tokens, added)
        self._bounds.frombytes((first + 1 + np.arange(len(added), dtype=np.int64)).tobytes())

    def copy(self, source: IndexedDataset) -> None:
        """Append every sequence and document of another pair, in blocks; ids are converted to this pair's dtype."""
        first = self.sequences
        for start in range(0, source.count, BLOCK):
            self._write_ids(source.read(start, min(BLOCK, source.count - start)))
        self._lengths.frombytes(source.lengths[:].tobytes())
        self._bounds.frombytes((source.document_indices[1:] + first).tobytes())
        if source.modes is not None:
            self._modes += source.modes[:].tobytes()

    def _append(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        if len(lengths) and lengths.max() > LONGEST:
            raise DataError(
                f"{self.bin_path}: a sequence of {lengths.max()} ids; this format's lengths end at {LONGEST}"
            )
        self._write_ids(tokens)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def _write_ids(self, tokens: NDArray[Any]) -> None:
        converted = np.ascontiguousarray(tokens, dtype=self.dtype)
        if converted.dtype != tokens.dtype and not np.array_equal(converted, tokens):
            raise DataError(f"{self.bin_path}: ids {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        self._bin.write(converted.data if len(converted) else b"")
        self.tokens += len(converted)

    def _publish(self) -> None:
        if self._unfinished:
            raise DataError(f"{self.bin_path}: the last document has no end")
        self._bin.flush()
        os.fsync(self._bin.fileno())
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        if self._modes and len(self._modes) != len(lengths):
            raise DataError(
                f"{self.idx_path}: modes of {len(self._modes)} out of {len(lengths)} sequences; merge pairs that all "
                "have them"
            )
        with open_unfinished(self.idx_path) as out:
            out.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], len(lengths), len(self._bounds)))
            out.write(lengths.astype("<i4").tobytes())
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            out.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            out.write(np.frombuffer(self._bounds, dtype=np.int64).astype("<i8").tobytes())
            out.write(self._modes)
            out.flush()
            os.fsync(out.fileno())
        self.idx_path.unlink(missing_ok=True)
        self._made_with_path.unlink(missing_ok=True)
        os.replace(self._bin_temporary, self.bin_path)
        if self._made_with is not None:
            with open(self._made_with_path, "wb") as told:
                told.write(self._made_with.written())
                told.flush()
                os.fsync(told.fileno())
        os.replace(self._idx_temporary, self.idx_path)
        sync_folder(self.bin_path.parent)


def merge(prefixes: list[str], output: str, *, overwrite: bool = False) -> PairWriter:
    """Join pairs into one, in order, with the widest dtype. Returns the closed writer, for its counts.

    The tokenizer is recorded if every pair records it. Raises DataError where the pairs have different tokenizers.
    """
    if "" in prefixes:
        raise DataError("--input '': names no pair of .bin and .idx")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    if not sources:
        raise DataError("nothing to merge: no prefix given")
    for source in sources:
        source.check()
    dtype = sources[0].dtype
    for source in sources[1:]:
        dtype = np.promote_types(dtype, source.dtype)
    with PairWriter(output, dtype, tokenizer_record=common(prefixes), overwrite=overwrite) as writer:
        for source in sources:
            writer.copy(source)
    return writer
