"""From text files to a .bin/.idx pair, by worker processes in bounded memory. Documents keep the order of the files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megazero.data.documents import RawDocument, documents, no_text, open_documents, text_of
from megazero.data.indexed import DataError, dtype_for
from megazero.data.input_files import ReaderOptions, find_files, is_json
from megazero.data.input_report import InputReport
from megazero.data.progress import Progress, Report
from megazero.data.tokenizer import Tokenizer, build_tokenizer, place_of
from megazero.data.tokenizer_differences import begins_of, told_of_differences
from megazero.data.tokenizer_record import tokenizer_record
from megazero.data.utf8 import count_replaced, is_utf8
from megazero.data.writer import PairWriter
from megazero.system.words import counted

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class PreprocessJob:
    """The arguments of a worker: the tokenizer, how to read, whether to append the separator to each document, and the
    separator's id, if it is not the tokenizer's.
    """

    tokenizer: str
    tokenizer_path: str | None
    reader: ReaderOptions = field(default_factory=ReaderOptions)
    append_eod: bool = False
    eod_id: int | None = None


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
    """Encodes batches in one worker. Raises DataError for --append-eod without a separator, and for --eod-id alone or
    outside the vocabulary.
    """

    def __init__(self, job: PreprocessJob) -> None:
        self.job = job
        self.tokenizer = build_tokenizer(job.tokenizer, job.tokenizer_path)
        self.eod_id = self.tokenizer.eod_id if job.eod_id is None else job.eod_id
        if job.append_eod and self.eod_id is None:
            raise DataError(
                f"--append-eod: the {job.tokenizer} tokenizer has no token that ends a document; name one: --eod-id"
            )
        if job.eod_id is not None and not job.append_eod:
            raise DataError(f"--eod-id {job.eod_id} has no effect without --append-eod")
        if job.append_eod and not 0 <= cast(int, self.eod_id) < self.tokenizer.vocab_size:
            raise DataError(f"--eod-id {self.eod_id}: the tokenizer has the ids 0 to {self.tokenizer.vocab_size - 1}")
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
                    ids.append(cast(int, self.eod_id))
                lengths.append(len(ids) - start)
                start = len(ids)
        open_end = not batch[-1].last
        if open_end:
            lengths.append(len(ids) - start)
        return Encoded(np.array(ids, dtype=self.dtype), lengths, open_end, characters, found, text_tokens)


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    inputs   what is read, in words, for an error
    what     the same, short, for the progress
    total    units that there are; None where that is not known before
    unit     of the progress
    batches  (units read so far, documents of about 1 MiB), in order; it counts what is left out
    """

    inputs: str
    what: str
    total: float | None
    unit: str
    batches: Callable[[InputReport], Generator[tuple[float, list[RawDocument]], None, None]]


def file_source(inputs: Sequence[str | Path], reader: ReaderOptions, report: Report) -> TextSource:
    """The documents of files and folders. Raises DataError for what is not there."""
    files = find_files(inputs, reader.include, report)
    count = counted(len(files), "file")

    def batches(told: InputReport) -> Generator[tuple[float, list[RawDocument]], None, None]:
        for read, batch in raw_batches(files, reader, told):
            yield read / 1e6, batch

    total = sum(path.stat().st_size for path in files) / 1e6
    return TextSource(f"{', '.join(map(str, inputs))} ({count})", count, total, "MB", batches)


def preprocess(
    inputs: Sequence[str | Path],
    output: str | Path,
    job: PreprocessJob,
    *,
    workers: int,
    report: Report,
    overwrite: bool = False,
) -> PairWriter:
    """`write_pair` of files and folders."""
    source = file_source(inputs, job.reader, report)
    return write_pair(source, output, job, workers=workers, report=report, overwrite=overwrite)


def write_pair(
    source: TextSource,
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
    told = InputReport(report=report)
    if job.tokenizer_path is not None:  # asked of the Hub once, and not by each worker
        job = replace(job, tokenizer_path=str(place_of(job.tokenizer_path)))
    encoder = DocumentEncoder(job)
    progress = Progress(report, f"tokenizing {source.what}", source.total, source.unit)
    made = tokenizer_record(encoder.tokenizer, job.tokenizer)
    for line in _told_of_tokenizer(encoder.tokenizer):
        report(line)
    with PairWriter(output, encoder.dtype, tokenizer_record=made, overwrite=overwrite) as writer:
        unfinished = 0
        for read, encoded in _encoded(source.batches(told), job, encoder, workers):
            lengths = encoded.lengths
            if lengths:
                lengths[0] += unfinished
                unfinished = lengths.pop() if encoded.open_end else 0
            writer.write(encoded.tokens, lengths, unfinished=unfinished)
            told.characters, told.replaced = told.characters + encoded.characters, told.replaced + encoded.replaced
            told.tokens += encoded.text_tokens
            progress.reach(read, f"; {counted(writer.documents, 'document')}, {counted(writer.tokens, 'token')}")
        told.require_text(source.inputs, f"--tokenizer {job.tokenizer} {job.tokenizer_path or ''}".strip())
    for line in told.lines(job.reader):
        report(line)
    return writer


def _told_of_tokenizer(tokenizer: Tokenizer) -> Iterator[str]:
    """How `transformers` would encode a document otherwise."""
    if begins := begins_of(tokenizer):
        yield (
            f"transformers puts {' '.join(map(str, begins))} before a text for this tokenizer; documents begin without "
            "it, and --append-eod ends them"
        )
    yield from told_of_differences(tokenizer)


def raw_batches(
    files: Sequence[Path], reader: ReaderOptions, told: InputReport | None = None
) -> Generator[tuple[int, list[RawDocument]], None, None]:
    """(packed bytes read so far, documents of about 1 MiB). told: counts the documents that are left out."""
    told = told or InputReport()
    before = size = 0
    nul = reader.encoding_errors == "replace"
    batch: list[RawDocument] = []
    for path in files:
        as_json = is_json(path) if reader.format == "auto" else reader.format == "jsonl"
        # A whole document is looked at before a piece of it has gone on.
        if reader.skip_undecodable and not _is_text(path, not as_json and reader.document == "file", nul):
            told.skip(str(path))
            before += path.stat().st_size
            continue
        with open_documents(path) as reading:
            for number, raw in enumerate(documents(reading, path, as_json, reader.document)):
                if number == 0 and not as_json and reader.format == "auto":
                    told.look_at(raw, reader)
                if reader.skip_undecodable and not is_utf8(BytesIO(raw.data), nul=nul):
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


def _is_text(path: Path, whole: bool, nul: bool) -> bool:
    """Whether a file is no archive, and with `whole` UTF-8 to its end (nul: NULs included).

    True for one that cannot be unpacked; reading it raises the error.
    """
    try:
        with open_documents(path) as reading:
            return not no_text(reading, path) and (not whole or is_utf8(reading.stream, nul=nul))
    except (OSError, EOFError, zlib.error):
        return True


def _encoded(
    batches: Iterator[tuple[float, list[RawDocument]]], job: PreprocessJob, encoder: DocumentEncoder, workers: int
) -> Iterator[tuple[float, Encoded]]:
    """(units read so far, tokenized batch), in order. At most three batches per worker are in memory."""
    if workers <= 1:
        for read, batch in batches:
            yield read, encoder(batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        ahead: deque[tuple[float, Future[Encoded]]] = deque()
        try:
            for read, batch in batches:
                ahead.append((read, pool.submit(_work, batch)))
                if len(ahead) >= 3 * workers:
                    yield ahead[0][0], ahead.popleft()[1].result()
            while ahead:
                yield ahead[0][0], ahead.popleft()[1].result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process was killed, as it happens where memory runs out; fewer of them need less: --workers "
                f"{workers // 2}"
            ) from error
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends them
    # A worker has both ends of its queue open, so it would not notice that its parent was killed.
    threading.Thread(target=leave_with_parent, daemon=True).start()
    _Worker.encode = DocumentEncoder(job)


def _work(batch: list[RawDocument]) -> Encoded:
    return _Worker.encode(batch)


def texts(inputs: Sequence[str | Path], reader: ReaderOptions, report: Report, what: str) -> Iterator[str]:
    """Decoded documents (long ones in pieces), for training a tokenizer. Raises DataError if there is no text."""
    source, told = file_source(inputs, reader, report), InputReport(report=report)
    progress = Progress(report, what, source.total, source.unit)
    with closing(source.batches(told)) as batches:
        for read, batch in batches:
            for raw in batch:
                text = text_of(raw, reader.json_key, reader.encoding_errors)
                told.characters += len(text)
                told.replaced += count_replaced(raw.data) if reader.encoding_errors == "replace" else 0
                yield text
            progress.reach(read)
    told.require_text(source.inputs)
    for line in told.lines(reader):
        report(line)
