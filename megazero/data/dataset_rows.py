"""Rows of a data set of the package datasets as documents: of Hugging Face's Hub, or of a folder or a file here.

The package reads them, and megazero takes the text of one column, row after row. A document is what a line of JSON
lines with the same text is, so that both make the same pair. Code of a data set is not executed: before its version 4
the package could do that, so older ones are refused.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.config.options import did_you_mean
from megazero.data.documents import RawDocument
from megazero.data.indexed import DataError
from megazero.data.preprocess import BATCH_BYTES, BATCH_DOCUMENTS, TextSource
from megazero.system.reading import BOUNDS, json_type, listed

KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""Ending of a file -> the package's name for its format."""
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that the package's `save_to_disk` has written."""
LEAST_VERSION = 4
LONGEST = 600
"""The most characters of an error of the package in a message."""
ROWS = 1000
"""Rows that the package hands over at once."""


@dataclass(frozen=True)
class DatasetRows:
    """The text of a data set.

    dataset    a name of the Hub, as ORG/NAME, ORG/NAME@REVISION or ORG/NAME:CONFIG; or the path of a file, or of a
               folder of files or of `save_to_disk`
    split      None: train, or all of a folder that has no splits
    column     the column of the text
    streaming  whether rows are read as they come, without a copy of the data set on the disk
    """

    dataset: str
    split: str | None = None
    column: str = "text"
    streaming: bool = False

    def __str__(self) -> str:
        return f"--dataset {self.dataset}" + (f" --split {self.split}" if self.split else "")

    def source(self) -> TextSource:
        """The documents. Raises DataError for what the package cannot open, and for a column that is not there;
        ImportError says what to install.
        """
        with _library(self):
            opened = _opened(self)
            columns = opened.column_names or [*next(iter(opened), {})]  # of a stream they may not be known before
        if self.column not in columns:
            hint = did_you_mean(self.column, columns)
            raise DataError(f"{self}: there is no column {self.column!r}{hint}; it has {listed(columns) or 'none'}")
        total = float(len(opened)) if hasattr(opened, "__len__") else None
        return TextSource(str(self), str(self), total, "rows", lambda _: self._batches(opened))

    def _batches(self, opened: Any) -> Generator[tuple[float, list[RawDocument]], None, None]:
        number, size, batch = 0, 0, list[RawDocument]()
        with _library(self):
            for rows in opened.select_columns([self.column]).iter(batch_size=ROWS):
                for text in rows[self.column]:
                    batch.append(self._document(number, text))
                    number, size = number + 1, size + len(batch[-1].data)
                    if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                        yield number, batch
                        size, batch = 0, []
        if batch:
            yield number, batch

    def _document(self, number: int, text: object) -> RawDocument:
        """A row as the line of JSON lines that it would be. number: of the row, from 0, as the package counts."""
        if not isinstance(text, str):
            raise DataError(f"{self}, row {number}: {self.column!r} holds {json_type(text)}, and no text")
        line = json.dumps({self.column: text}).encode()
        if len(line) > BOUNDS.document:
            raise DataError(
                f"{self}, row {number} is longer than {BOUNDS.document:,} bytes, the most that is read as one document"
            )
        return RawDocument(str(self), number + 1, line, is_json=True, last=True)


@contextmanager
def _library(rows: DatasetRows) -> Iterator[None]:
    """Turn errors of the package, which come from many libraries beneath it, into DataError."""
    try:
        yield
    except (DataError, ImportError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        absent = "" if Path(rows.dataset).expanduser().exists() else "there is no such folder or file here, and "
        raise DataError(f"{rows}: {absent}the package datasets cannot read it: {reason[:LONGEST]}") from error


def _opened(rows: DatasetRows) -> Any:
    """The package's Dataset or IterableDataset of one split."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("--dataset needs the package datasets: pip install datasets") from error
    if int(datasets.__version__.split(".")[0]) < LEAST_VERSION:
        raise ImportError(
            f"--dataset needs datasets {LEAST_VERSION} or later, which executes no code of a data set; installed is "
            f"{datasets.__version__}: pip install -U datasets"
        )
    place, split = Path(rows.dataset).expanduser(), rows.split or "train"
    if any((place / name).is_file() for name in SAVED):
        return _of_folder(rows, datasets.load_from_disk(str(place)))
    if place.is_file():
        if place.suffix.lower() not in KINDS:
            raise DataError(f"{rows}: {place.name} ends in none of {', '.join(KINDS)}; --input reads texts")
        kind, files = KINDS[place.suffix.lower()], str(place)
        return datasets.load_dataset(kind, data_files=files, split=split, streaming=rows.streaming)
    if place.exists():
        return datasets.load_dataset(str(place), split=split, streaming=rows.streaming)
    name, _, config = rows.dataset.removeprefix("hf://").partition(":")
    repository, _, revision = name.partition("@")
    return datasets.load_dataset(
        repository, config or None, split=split, revision=revision or None, streaming=rows.streaming
    )


def _of_folder(rows: DatasetRows, loaded: Any) -> Any:
    """The split of what `save_to_disk` has written: of several, or of one without a name. Raises DataError."""
    if not isinstance(loaded, dict):
        if rows.split not in (None, str(loaded.split)):
            raise DataError(f"{rows}: the folder holds one split, {loaded.split or 'without a name'}: drop --split")
        return loaded
    split = rows.split or "train"
    if split not in loaded:
        raise DataError(f"--dataset {rows.dataset}: there is no split {split!r}; --split is one of {listed(loaded)}")
    return loaded[split]
