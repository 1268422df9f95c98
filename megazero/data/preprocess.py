"""From text files to a .bin/.idx pair, by worker processes in bounded memory. Documents keep the order of the files."""

from __future__ import annotations

import multiprocessing
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.documents import RawDocument, documents, find_files, is_json, open_documents, text_of
from megazero.data.indexed import DataError, dtype_for
from megazero.data.progress import Progress, Report
from megazero.data.tokenizer import build_tokenizer
from megazero.data.tokenizer_record import tokenizer_record
from megazero.data.utf8 import count_replaced, is_utf8
from megazero.data.writer import PairWriter

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class ReaderOptions:
    """How documents are read from files."""

    json_key: str = "text"
    "Key of the text in a jsonl record."
    format: str = "auto"
    "auto: by the file's ending; jsonl and text override it."
    document: str = "file"
    "A document of plain text: the whole file, or each line."
    encoding_errors: str = "strict"
    "strict or replace, for bytes that are no UTF-8."
    include: tuple[str, ...] = ()
    "Patterns of the files that are read in folders; none: all."
    skip_undecodable: bool = False
    "Leave out documents that are no UTF-8."


@dataclass
class InputReport:
    """Counts of the input, which are reported at the end.

    skipped     documents that were left out because they are no UTF-8
    first       place of the first of them
    replaced    characters that replace bytes that are no UTF-8
    characters  characters of text
    tokens      tokens of text, without separators
    """

    skipped: int = 0
    first: str = ""
    replaced: int = 0
    characters: int = 0
    tokens: int = 0

    def skip(self, where: str) -> None:
        self.skipped += 1
        self.first = self.first or where

    def lines(self, reader: ReaderOptions) -> list[str]:
        told = [
            f"--skip-undecodable: {self.skipped:,} documents left out"
            + f", the first of them {self.first}" * bool(self.first)
        ]
        replaced = [f"--encoding-errors replace: {self.replaced:,} characters stand for bytes that are no UTF-8"]
        return told * reader.skip_undecodable + replaced * (reader.encoding_errors == "replace")

    def require_text(self, inputs: Sequence[str | Path], files: int, tokenizer: str = "") -> None:
        """Raise DataError if there was no text, or no token for it."""
        if not self.characters:
            skipped = f"; {self.skipped:,} documents that are no UTF-8 were left out" if self.skipped else ""
            raise DataError(f"no text in {', '.join(map(str, inputs))} ({files:,} files){skipped}")
        if tokenizer and not self.tokens:
            raise DataError(
                f"{tokenizer} gives no token for any of {self.characters:,} characters of text: it does not know them"
            )


@dataclass(frozen=True)
class PreprocessJob:
    """The arguments of a worker: the tokenizer, how to read, and whether to append the separator to each document."""

    tokenizer: str
    tokenizer_path: str | None
    reader: ReaderOptions = field(default_factory=ReaderOptions)
    append_eod: bool = False


@dataclass(frozen=True)
class Encoded:
    """A tokenized batch.

    tokens    ids back to back
    lengths   numbers of ids of its documents
    open_end  whether the last document continues in the next batch

    characters, replaced and text_tokens are counts as in `InputReport`.
    """

    tokens: NDArray[Any]
    lengths: list[int]
    open_end: bool
    characters: int
    replaced: int
    text_tokens: int


class DocumentEncoder:
    """Encodes batches in one worker. Raises DataError for --append-eod without a separator."""

    def __init__(self, job: PreprocessJob) -> None:
        self.job = job
        self.tokenizer = build_tokenizer(job.tokenizer, job.tokenizer_path)
        if job.append_eod and self.tokenizer.eod_id is None:
            raise DataError(f"--append-eod: the {job.tokenizer} tokenizer has no token that ends a document")
        self.dtype = dtype_for(self.tokenizer.vocab_size)

    def __call__(self, batch: list[RawDocument]) -> Encoded:
        ids: list[int] = []
        lengths: list[int] = []
        start = characters = found = text_tokens = 0
        for raw in batch:
            text = text_of(raw, self.job.reader.json_key, self.job.reader.encoding_errors)
            if self.job.reader.encoding_errors == "replace":
                found += count_replaced(raw.data)
            new = self.tokenizer.encode(text)
            characters, text_tokens = characters + len(text), text_tokens + len(new)
            ids += new
            if raw.last:
                if self.job.append_eod:
                    assert self.tokenizer.eod_id is not None
                    ids.append(self.tokenizer.eod_id)
                lengths.append(len(ids) - start)
                start = len(ids)
        open_end = not batch[-1].last
        if open_end:
            lengths.append(len(ids) - start)
        return Encoded(np.array(ids, dtype=self.dtype), lengths, open_end, characters, found, text_tokens)


def preprocess(
    inputs: Sequence[str | Path],
    output: str | Path,
    job: PreprocessJob,
    *,
    workers: int,
    report: Report,
    overwrite: bool = False,
) -> PairWriter:
    """Write output.bin, output.idx and output.tokenizer, or none of them. Returns the closed writer.

    Each document is one sequence, also an empty one. Raises DataError if there is no text at all.
    """
    files, told = find_files(inputs, job.reader.include), InputReport()
    total = sum(path.stat().st_size for path in files)
    encoder = DocumentEncoder(job)
    progress = Progress(report, f"tokenizing {len(files)} file(s)", total / 1e6, "MB")
    made = tokenizer_record(encoder.tokenizer, job.tokenizer)
    with PairWriter(output, encoder.dtype, tokenizer_record=made, overwrite=overwrite) as writer:
        unfinished = 0
        for read, encoded in _encoded(files, job, encoder, workers, told):
            lengths = encoded.lengths
            if lengths:
                lengths[0] += unfinished
                unfinished = lengths.pop() if encoded.open_end else 0
            writer.write(encoded.tokens, lengths, unfinished=unfinished)
            told.characters, told.replaced = told.characters + encoded.characters, told.replaced + encoded.replaced
            told.tokens += encoded.text_tokens
            progress.reach(read / 1e6, f"; {writer.documents:,} documents, {writer.tokens:,} tokens")
        told.require_text(inputs, len(files), f"--tokenizer {job.tokenizer} {job.tokenizer_path or ''}".strip())
    for line in told.lines(job.reader):
        report(line)
    return writer


def raw_batches(
    files: Sequence[Path], reader: ReaderOptions, told: InputReport | None = None
) -> Generator[tuple[int, list[RawDocument]], None, None]:
    """(packed bytes read so far, documents of about 1 MiB). told: counts the documents that are left out."""
    told = told or InputReport()
    before = size = 0
    batch: list[RawDocument] = []
    for path in files:
        as_json = is_json(path) if reader.format == "auto" else reader.format == "jsonl"
        if (
            reader.skip_undecodable and not as_json and reader.document == "file" and not _decodes(path)
        ):  # before a piece of it has gone on
            told.skip(str(path))
            before += path.stat().st_size
            continue
        with open_documents(path) as reading:
            for raw in documents(reading, path, as_json, reader.document):
                if reader.skip_undecodable and not is_utf8(BytesIO(raw.data)):
                    told.skip(f"{raw.path}, line {raw.line}")
                    continue
                batch.append(raw)
                size += len(raw.data)
                if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                    yield before + reading.raw.tell(), batch
                    batch, size = [], 0
        before += path.stat().st_size
    if batch:
        yield before, batch


def _decodes(path: Path) -> bool:
    """Whether a whole file is UTF-8. True for one that cannot be unpacked; reading it raises the error."""
    try:
        with open_documents(path) as reading:
            return is_utf8(reading.stream)
    except (OSError, EOFError, zlib.error):
        return True


def _encoded(
    files: Sequence[Path], job: PreprocessJob, encoder: DocumentEncoder, workers: int, told: InputReport
) -> Iterator[tuple[int, Encoded]]:
    """(packed bytes read so far, tokenized batch), in order. At most three batches per worker are in memory."""
    batches = raw_batches(files, job.reader, told)
    if workers <= 1:
        for read, batch in batches:
            yield read, encoder(batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        ahead: deque[tuple[int, Future[Encoded]]] = deque()
        try:
            for read, batch in batches:
                ahead.append((read, pool.submit(_work, batch)))
                if len(ahead) >= 3 * workers:
                    yield ahead[0][0], ahead.popleft()[1].result()
            while ahead:
                yield ahead[0][0], ahead.popleft()[1].result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Worker:
    """The state of a worker process between batches."""

    encode: Callable[[list[RawDocument]], Encoded]


def _start_worker(job: PreprocessJob) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    # A worker has both ends of its queue open, so it would not notice that its parent was killed.
    threading.Thread(target=leave_with_parent, daemon=True).start()
    _Worker.encode = DocumentEncoder(job)


def _work(batch: list[RawDocument]) -> Encoded:
    return _Worker.encode(batch)


def texts(inputs: Sequence[str | Path], reader: ReaderOptions, report: Report, what: str) -> Iterator[str]:
    """Decoded documents (long ones in pieces), for training a tokenizer. Raises DataError if there is no text."""
    files, told = find_files(inputs, reader.include), InputReport()
    progress = Progress(report, what, sum(path.stat().st_size for path in files) / 1e6, "MB")
    with closing(raw_batches(files, reader, told)) as batches:
        for read, batch in batches:
            for raw in batch:
                text = text_of(raw, reader.json_key, reader.encoding_errors)
                told.characters += len(text)
                told.replaced += count_replaced(raw.data) if reader.encoding_errors == "replace" else 0
                yield text
            progress.reach(read / 1e6)
    told.require_text(inputs, len(files))
    for line in told.lines(reader):
        report(line)
