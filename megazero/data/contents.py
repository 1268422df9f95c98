"""What data hold, in three numbers: a run that resumes knows them again wherever their files lie by then."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megazero.config.schema import DataConfig
from megazero.data.build import cache_root, parse_data_path, parse_valid_data_path
from megazero.data.cache import cached_arrays
from megazero.data.file_array import FileArray
from megazero.data.id_range import file_identity
from megazero.data.indexed import BLOCK, IndexedDataset
from megazero.data.input_files import find_files
from megazero.data.progress import Report

MARKS = 64
"""Number of places of a pair whose tokens are in its checksum. To read all tokens of a terabyte would take minutes."""
MARK = 1 << 12
"""Tokens of such a place."""
NUMBERS = ("documents of a pair, or files of conversations", "tokens, or bytes", "checksum")
Contents = tuple[tuple[int, ...], ...]
"""`NUMBERS` of each pair of --data-path; of --instruction-data one entry for all files."""


@dataclass(frozen=True)
class _Part:
    """facts: identify the files as they are now, for the key of the cache. read: reads the three numbers."""

    facts: dict[str, Any]
    read: Callable[[], tuple[int, ...]]


def contents_of(cfg: DataConfig) -> Contents:
    """The contents of the training data that a run names. Raises DataError, or OSError for a file that it cannot
    read.
    """
    return tuple(part.read() for part in _parts(cfg))


def cached_contents(cfg: DataConfig, report: Report) -> Contents:
    """As `contents_of`, from the cache: one process of a file system reads the data once."""
    return _cached(_parts(cfg), cfg, report)


def cached_validation_contents(cfg: DataConfig, report: Report) -> Contents:
    """The same of the sets that the run names for validation alone."""
    if cfg.valid_instruction_data:
        return _cached([_of_files(find_files(cfg.valid_instruction_data))], cfg, report)
    prefixes = parse_valid_data_path(cfg.valid_data_path).values()
    return _cached([_of_pair(IndexedDataset(prefix)) for prefix in prefixes], cfg, report)


def _cached(parts: Iterable[_Part], cfg: DataConfig, report: Report) -> Contents:
    root = cache_root(cfg)

    def numbers(part: _Part) -> tuple[int, ...]:
        arrays = cached_arrays(root, "contents", part.facts, lambda say: {"numbers": np.array(part.read())}, report)
        return tuple(arrays["numbers"][:].tolist())

    return tuple(map(numbers, parts))


def _parts(cfg: DataConfig) -> list[_Part]:
    if cfg.instruction_data:
        return [_of_files(find_files(cfg.instruction_data))]
    prefixes = parse_data_path(cfg.data_path).prefixes if cfg.data_path else ()
    return [_of_pair(IndexedDataset(prefix)) for prefix in prefixes]


def _of_pair(data: IndexedDataset) -> _Part:
    """The checksum is of all lengths, all bounds of documents, and tokens at evenly spaced places. It does not depend
    on the dtype in which the ids are stored.
    """

    def read() -> tuple[int, ...]:
        checksum = _of_array(data.document_indices, _of_array(data.lengths, 0))
        for start in np.unique(np.linspace(0, max(0, data.count - MARK), MARKS).astype(np.int64)).tolist():
            tokens = data.read(start, min(MARK, data.count - start)).astype("<i8")
            checksum = zlib.crc32(tokens.tobytes(), checksum)
        return len(data.document_indices) - 1, data.count, checksum

    return _Part(file_identity(data), read)


def _of_array(values: FileArray, checksum: int) -> int:
    for start in range(0, len(values), BLOCK):
        checksum = zlib.crc32(np.ascontiguousarray(values[start : start + BLOCK]).tobytes(), checksum)
    return checksum


def _of_files(paths: Sequence[Path]) -> _Part:
    stats = [path.stat() for path in paths]

    def read() -> tuple[int, ...]:
        return len(paths), sum(stat.st_size for stat in stats), checksum_of(paths)

    names = [str(path.resolve()) for path in paths]
    facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(names, stats, strict=True)]
    return _Part({"files": facts}, read)


def checksum_of(paths: Sequence[Path]) -> int:
    """The CRC-32 of all that these files hold, one after the other."""
    checksum = 0
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                checksum = zlib.crc32(block, checksum)
    return checksum
