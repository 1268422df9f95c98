"""Text files to a .bin/.idx pair, with many worker processes, bounded memory, and documents in the order of the files."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.documents import Raw, documents, find_files, is_json, opened, text_of
from megazero.data.indexed import DataError, dtype_for
from megazero.data.progress import Progress, Report
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.writer import PairWriter

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Reader:
    """How bytes become documents."""

    json_key: str = "text"
    format: str = "auto"
    "auto goes by the file's ending; jsonl or text overrides it."
    document: str = "file"
    "A document of plain text: the whole file, or each line."
    encoding_errors: str = "strict"


@dataclass(frozen=True)
class Job:
    """What workers need: how to read, which tokenizer, and the id to append to each document (None: none)."""

    tokenizer: str
    tokenizer_path: str | None
    reader: Reader = field(default_factory=Reader)
    append_eod: bool = False


@dataclass(frozen=True)
class Encoded:
    """Ids back to back; lengths of the documents, `open_end` when the last of them goes on in the next batch."""

    tokens: NDArray[Any]
    lengths: list[int]
    open_end: bool


class Encoder:
    """One worker's tokenizer at work."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tokenizer: Tokenizer = build_tokenizer(job.tokenizer, job.tokenizer_path)
        if job.append_eod and self.tokenizer.eod_id is None:
            raise DataError(f"--append-eod: the {job.tokenizer} tokenizer has no token that ends a document")
        self.dtype = dtype_for(self.tokenizer.vocab_size)

    def __call__(self, batch: list[Raw]) -> Encoded:
        ids: list[int] = []
        lengths: list[int] = []
        start = 0
        for raw in batch:
            ids += self.tokenizer.encode(text_of(raw, self.job.reader.json_key, self.job.reader.encoding_errors))
            if raw.last:
                if self.job.append_eod:
                    assert self.tokenizer.eod_id is not None
                    ids.append(self.tokenizer.eod_id)
                lengths.append(len(ids) - start)
                start = len(ids)
        open_end = not batch[-1].last
        if open_end:
            lengths.append(len(ids) - start)
        return Encoded(np.array(ids, dtype=self.dtype), lengths, open_end)


def preprocess(
    inputs: Sequence[str | Path], output: str | Path, job: Job, *, workers: int, report: Report, overwrite: bool = False
) -> PairWriter:
    """Write output.bin and output.idx, or neither; one sequence per document, empty documents included. Returns the closed writer."""
    files = find_files(inputs)
    total = sum(path.stat().st_size for path in files)
    encoder = Encoder(job)
    progress = Progress(report, f"tokenizing {len(files)} file(s)", total / 1e6, "MB")
    with PairWriter(output, encoder.dtype, overwrite=overwrite) as writer:
        unfinished = 0
        for read, encoded in _encoded(files, job, encoder, workers):
            lengths = encoded.lengths
            if lengths:
                lengths[0] += unfinished
                unfinished = lengths.pop() if encoded.open_end else 0
            writer.write(encoded.tokens, lengths, unfinished=unfinished)
            progress.reach(read / 1e6, f"; {writer.documents:,} documents, {writer.tokens:,} tokens")
    return writer


def raw_batches(files: Sequence[Path], reader: Reader) -> Generator[tuple[int, list[Raw]], None, None]:
    """(packed bytes read so far, documents of about a MiB)."""
    before = size = 0
    batch: list[Raw] = []
    for path in files:
        as_json = is_json(path) if reader.format == "auto" else reader.format == "jsonl"
        with opened(path) as reading:
            for raw in documents(reading, path, as_json, reader.document):
                batch.append(raw)
                size += len(raw.data)
                if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                    yield before + reading.raw.tell(), batch
                    batch, size = [], 0
        before += path.stat().st_size
    if batch:
        yield before, batch


def _encoded(files: Sequence[Path], job: Job, encoder: Encoder, workers: int) -> Iterator[tuple[int, Encoded]]:
    """Batches in order; at most a few per worker are under way, so that a slow tokenizer cannot pile up text."""
    batches = raw_batches(files, job.reader)
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
    """What a worker process keeps between batches."""

    encode: Callable[[list[Raw]], Encoded]


def _start_worker(job: Job) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    # A worker holds both ends of its own queue, so it would never see that its parent was killed.
    threading.Thread(target=leave_with_parent, daemon=True).start()
    _Worker.encode = Encoder(job)


def _work(batch: list[Raw]) -> Encoded:
    return _Worker.encode(batch)


def texts(inputs: Sequence[str | Path], reader: Reader, report: Report, what: str) -> Iterator[str]:
    """Decoded documents (long ones in pieces), for training a tokenizer."""
    files = find_files(inputs)
    progress = Progress(report, what, sum(path.stat().st_size for path in files) / 1e6, "MB")
    with closing(raw_batches(files, reader)) as batches:
        for read, batch in batches:
            for raw in batch:
                yield text_of(raw, reader.json_key, reader.encoding_errors)
            progress.reach(read / 1e6)
