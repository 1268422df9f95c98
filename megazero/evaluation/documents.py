"""Streams of documents to score: from .bin/.idx pairs as they are, or from text and jsonl through a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megazero.data.documents import READING_ON, text_of
from megazero.data.indexed import IndexedDataset
from megazero.data.input_files import ReaderOptions, find_files
from megazero.data.preprocess import raw_batches
from megazero.data.tokenizer import Tokenizer
from megazero.evaluation.windows import Ids


@dataclass(frozen=True)
class Document:
    """A document to score.

    source  the file or prefix that it is from
    number  its index there, from 0
    ids     its tokens
    nbytes  bytes of its text in UTF-8; None if only ids are known
    """

    source: str
    number: int
    ids: Ids
    nbytes: int | None = None


def indexed_documents(prefix: str) -> Iterator[Document]:
    """The documents of PREFIX.bin and PREFIX.idx, with the separators that they have. Raises DataError."""
    data = IndexedDataset(prefix)
    data.check()
    bounds = data.document_indices
    for number in range(len(bounds) - 1):
        first, last = int(bounds[number]), int(bounds[number + 1])
        start = int(data.pointers[first]) // data.dtype.itemsize if last > first else 0
        yield Document(prefix, number, data.read(start, data.tokens_between(first, last)))


def text_documents(
    inputs: Sequence[str | Path], reader: ReaderOptions, tokenizer: Tokenizer, append: int | None = None
) -> Iterator[Document]:
    """The documents of files and folders, as `megazero prepare-data` reads them. append: a token added to each.

    Raises DataError.
    """
    ids: list[int] = []
    nbytes, before, number = 0, "", 0
    with closing(raw_batches(find_files(inputs), reader)) as batches:
        for _, batch in batches:
            for raw in batch:
                number = number if raw.path == before else 0
                before = raw.path
                text = text_of(raw, reader.json_key, reader.encoding_errors, READING_ON)
                ids += tokenizer.encode(text)
                nbytes += len(text.encode())
                if raw.last:
                    yield Document(raw.path, number, [*ids, append] if append is not None else ids, nbytes)
                    ids, nbytes, number = [], 0, number + 1
